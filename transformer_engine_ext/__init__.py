"""FP8 training state: quantized tensors and their bytes, scaling recipes, providers of FP8 products, scaled AdamW.

This package imports neither ``megatron_ft`` nor Megatron. In ``megatron_ft``, only ``mcore`` may import it.
"""

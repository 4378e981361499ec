"""FP8 training: quantized tensors, scaling recipes, FP8 matrix products, and AdamW with quantized state.

This package imports neither ``megatron_ft`` nor Megatron. In ``megatron_ft``, only ``mcore`` may import it.
"""

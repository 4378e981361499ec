"""megatron-ft: fault-tolerant pre-training of mixture-of-experts models on Megatron-Core."""

__version__ = "0.1.0.dev0"

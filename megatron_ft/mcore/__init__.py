"""Training on Megatron-Core: the only folder that imports ``megatron``."""

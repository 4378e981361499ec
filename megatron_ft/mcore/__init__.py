"""Training on Megatron-Core. Only this folder imports ``megatron``."""

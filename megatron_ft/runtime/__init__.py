"""Mechanisms over torch and torch.distributed; knows nothing of Megatron."""

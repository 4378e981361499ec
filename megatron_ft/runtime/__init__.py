"""Mechanisms over torch and torch.distributed, independent of Megatron."""

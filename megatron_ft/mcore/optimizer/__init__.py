"""Megatron's optimizer, taken apart at the commit point."""

"""Prepares a process for Megatron-Core on its device. ``install`` comes before any import of megatron."""

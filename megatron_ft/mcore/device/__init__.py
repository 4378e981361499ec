"""Prepares a process for Megatron-Core on its device. Call ``install`` before anything imports ``megatron``."""

"""Attaches the project to Megatron-Core: the only folder that imports ``megatron``."""

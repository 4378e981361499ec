"""Builds the Megatron model a configuration describes, with weights that depend on their names only."""

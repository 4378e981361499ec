"""Builds the Megatron model of a configuration, with weights that depend on their names only."""

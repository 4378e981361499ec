"""Builds the Megatron model of a configuration. Initial weights depend only on the seed and the parameter's name."""

"""Mixture-of-experts parts of the model that differ from Megatron's."""

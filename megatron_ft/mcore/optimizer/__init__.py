"""Megatron's optimizer, divided into steps around the commit point."""

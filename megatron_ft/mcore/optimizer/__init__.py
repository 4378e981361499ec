"""Megatron's optimizer, divided into steps before and after the commit vote."""

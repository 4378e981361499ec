"""Measurements behind every figure the project states: one claim, one script, one dated result."""

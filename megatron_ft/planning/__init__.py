"""Decisions as pure functions, which make immutable plans from configurations and counts. No torch, clocks or files."""

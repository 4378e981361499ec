"""Decides. Pure functions from configurations and counts to frozen plans: no torch, clocks or files."""

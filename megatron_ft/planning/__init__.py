"""Decisions: pure functions from configurations and counts to frozen plans. No torch, clocks or files."""

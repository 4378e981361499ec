"""Copies live state out while training continues."""

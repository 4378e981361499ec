"""Copies live state out while training goes on."""

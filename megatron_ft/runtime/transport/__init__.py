"""Ends operations that wait for lost ranks."""

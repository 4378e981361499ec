"""Captures, compares and restores a rank's state between two iterations, and passes it on to the next membership."""

"""Captures windows of a rank's state during training, and restores the newest window when a run starts."""

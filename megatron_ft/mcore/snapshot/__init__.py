"""Captures windows (snapshots in slices) of a rank's state, and restores the newest window when a run starts."""

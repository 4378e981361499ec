"""Snapshots: which operators are captured at which iteration, and where copies go."""

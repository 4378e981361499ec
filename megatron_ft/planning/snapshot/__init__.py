"""Snapshots: which operators are captured in which iteration, and which nodes keep copies."""

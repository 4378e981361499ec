"""Processes of a node: its agent, the ranks that the agent starts, and sidecars beside the ranks."""

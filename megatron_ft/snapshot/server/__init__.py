"""Keeps: a node's process that owns the memory of snapshots, replicates and persists it. No torch."""

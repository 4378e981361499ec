"""The process of a node that owns the memory of snapshots, replicates and persists them. No torch."""

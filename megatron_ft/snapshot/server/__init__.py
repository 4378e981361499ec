"""A node's process that owns the memory of snapshots, replicates and persists them. No torch."""

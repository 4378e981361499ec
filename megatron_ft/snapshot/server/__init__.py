"""The snapshot server: a process on each node that owns the memory of snapshots, replicates and persists them. No
torch."""

"""The snapshot server, a process on each node that owns the memory of snapshots and replicates it. It does not import
torch."""

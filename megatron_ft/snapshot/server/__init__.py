"""The snapshot server, a process on each node that owns the memory of snapshots and replicates it. No torch."""

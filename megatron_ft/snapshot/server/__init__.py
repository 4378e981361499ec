"""The snapshot server: a process on each node that owns the memory of snapshots, and sends copies of them to other
nodes. It does not import torch."""

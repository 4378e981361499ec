"""Slurm: the nodes of a job, and how a job outlives its console, its nodes and its allocation."""

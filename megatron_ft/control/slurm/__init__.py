"""Slurm: the nodes of a job, and how a job outlives its launcher, its nodes and its allocation."""

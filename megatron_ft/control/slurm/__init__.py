"""All code for Slurm alone: the nodes of a job, and how a job outlives its launcher, nodes and allocation."""

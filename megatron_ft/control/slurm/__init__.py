"""All code specific to Slurm: the nodes of a job, and how a job outlives its launcher, nodes and allocation."""

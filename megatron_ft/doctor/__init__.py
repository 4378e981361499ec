"""Checks whether a machine is ready for a job, before the job is submitted to it."""

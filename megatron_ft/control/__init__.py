"""Starts, watches and stops the processes of a job, and decides which nodes belong to the job. Imports no torch."""

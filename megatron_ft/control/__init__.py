"""Starts, watches and stops the processes of a job, and decides who belongs to it. No torch."""

"""Checks a machine for what a job needs, before the job is submitted to it."""

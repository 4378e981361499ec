"""Failures that jobs are put through: schedules of them, where they come from, and how they reach a living job."""

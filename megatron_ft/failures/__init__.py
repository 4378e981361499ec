"""Failures of jobs: schedules, their sources, and their injection into a running job."""

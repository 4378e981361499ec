"""Launchers start the processes of a job."""

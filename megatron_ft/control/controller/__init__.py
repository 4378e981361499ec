"""The process that decides for a job, and what reaches it."""

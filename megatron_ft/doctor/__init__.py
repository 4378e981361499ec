"""What a machine lacks for a job, found before the job is submitted to it."""

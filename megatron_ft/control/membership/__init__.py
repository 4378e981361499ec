"""Who belongs to a job and what happens next: pure, without clocks, files or sockets."""

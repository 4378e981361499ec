"""The controller of a job: the process that decides which nodes and ranks start, continue or stop."""

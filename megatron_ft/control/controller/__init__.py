"""The process that makes the decisions of a job."""

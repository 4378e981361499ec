"""What a job continues from after a failure, and how it gets there."""

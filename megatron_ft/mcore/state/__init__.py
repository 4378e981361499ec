"""The state of a rank between two iterations: captured, passed on to the next membership, compared and restored."""

"""Continues training in the next membership after a failure, and selects the state from which a run starts."""

"""Recovery: the state from which a job continues after a failure, and how ranks reach it."""

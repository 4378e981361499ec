"""Recovery: the state that a job continues from after a failure, and how ranks reach it."""

"""Cost models: parameters and bytes per rank, time of a pipeline, effective training time."""

"""The training loop of one rank, and the engine that runs its iterations."""

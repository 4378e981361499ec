"""Dense checkpoints (group ``checkpoint``)."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Saving, retention and loading of dense checkpoints."""

    save_interval_iterations: int = 0
    """Number of iterations between two saves; 0 saves only at the end."""
    save_at_end: bool = True
    """Save after the last iteration."""
    async_save: bool = True
    """Write in the background while training continues."""
    keep_last: int = 2
    """Number of newest complete checkpoints to keep; 0 keeps all."""
    keep_every_iterations: int = 0
    """Also keep checkpoints whose iteration is a multiple of this; 0 keeps no others."""
    load: str | None = None
    """Checkpoint directory from which a new run starts (weights, optimizer, position); it may belong to another run.
    Differences in configuration are printed. null starts at iteration 0 without a checkpoint."""
    trust: bool = False
    """Load a checkpoint without a manifest of this project. Its metadata is pickled, so loading it can run code."""
    fully_parallel: bool = True
    """Distribute writing and reading over the data-parallel ranks."""
    allow_other_data: bool = False
    """Resume a run from its own checkpoint although the training data has changed."""

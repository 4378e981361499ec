"""Dense checkpoints (group ``checkpoint``)."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Saving, retention and loading of dense checkpoints."""

    save_interval_iterations: int = 0
    """Iterations from one save to the next; 0 saves at the end only."""
    save_at_end: bool = True
    """Save after the last iteration."""
    async_save: bool = True
    """Write in the background while training continues."""
    keep_last: int = 2
    """Number of newest complete checkpoints to keep; 0 keeps all."""
    keep_every_iterations: int = 0
    """Also keep checkpoints whose iteration is a multiple of this; 0 keeps no others."""
    load: str | None = None
    """Checkpoint directory of any run to start from (weights, optimizer, position); differences in configuration are
    printed. Null starts from scratch."""
    trust: bool = False
    """Load a checkpoint that has no manifest of this project. Its metadata is pickled: loading it can run code."""
    fully_parallel: bool = True
    """Distribute writing and reading over the data-parallel ranks."""
    allow_other_data: bool = False
    """Resume a run from its own checkpoint although the training data has changed."""

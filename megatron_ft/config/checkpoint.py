"""Dense checkpoints (group ``checkpoint``)."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """When dense checkpoints are written, kept and trusted."""

    save_interval_iterations: int = 0
    """Save every so many iterations; 0 only at the end."""
    save_at_end: bool = True
    """Save after the last iteration."""
    async_save: bool = True
    """Write in the background; training goes on."""
    keep_last: int = 2
    """Newest complete checkpoints kept; 0 keeps all."""
    keep_every_iterations: int = 0
    """Also keep those whose iteration is a multiple of this; 0 none."""
    load: str | None = None
    """Checkpoint directory to start from (weights, optimizer, position), of any run; what it differs in is printed.
    Null starts fresh."""
    trust: bool = False
    """Load a checkpoint without a manifest of ours. Its metadata is pickle: it can run code."""
    fully_parallel: bool = True
    """Spread writing and reading over data-parallel ranks."""
    allow_other_data: bool = False
    """Continue a run from a checkpoint of its own although the training data differs from what it was trained on."""

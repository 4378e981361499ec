"""Dense checkpoints: saving, retention and loading (group ``checkpoint``)."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Saving, retention and loading of dense checkpoints."""

    save_interval_iterations: int = 0
    """Number of iterations between two saves; 0 saves only after the last iteration."""
    save_at_end: bool = True
    """Save a checkpoint after the last iteration."""
    async_save: bool = True
    """Write checkpoints in the background while training continues."""
    keep_last: int = 2
    """Number of newest complete checkpoints to keep; 0 keeps all checkpoints."""
    keep_every_iterations: int = 0
    """Also keep every checkpoint whose iteration is a multiple of this number; 0 keeps only the newest."""
    load: str | None = None
    """Checkpoint directory from which a new run starts. Weights, optimizer state and data position are loaded.
    Differences between the configurations of checkpoint and job are printed. The checkpoint may belong to another run.
    A folder of Megatron-LM stands for its newest checkpoint. null starts without a checkpoint."""
    load_weights: str | None = None
    """Checkpoint directory whose weights a new run starts with, at iteration 0 and with new optimizer state.
    ``tools/convert_checkpoint.py`` makes such a directory from a Hugging Face folder; a checkpoint of another run can
    be used, too, and a folder of Megatron-LM. The model must be the same. null starts with random weights."""
    trust: bool = False
    """Allow ``checkpoint.load`` and ``checkpoint.load_weights`` to name a checkpoint without this project's manifest.
    Loading unpickles its metadata, so a malicious checkpoint can run code."""
    fully_parallel: bool = True
    """Split writing and reading of a checkpoint over the data-parallel ranks."""
    allow_other_data: bool = False
    """Allow a run to resume from its own checkpoint although the training data has changed."""

"""Dense checkpoints: saving, retention and loading (group ``checkpoint``)."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Saving, retention and loading of dense checkpoints."""

    save_interval_iterations: int = 0
    """Number of iterations between two saves; 0 saves nothing while the job trains (see ``checkpoint.save_at_end``)."""
    save_at_end: bool = True
    """Save a checkpoint after the last iteration of the job, or when the job is asked to stop."""
    async_save: bool = True
    """Write checkpoints in the background while training continues."""
    keep_last: int = 2
    """Number of newest complete checkpoints to keep; 0 keeps all checkpoints."""
    keep_every_iterations: int = 0
    """Also keep every checkpoint whose iteration is a multiple of this number; 0 keeps no additional checkpoint."""
    load: str | None = None
    """Checkpoint directory from which a new run starts. Weights, optimizer state and data position are loaded.
    Differences between the configurations of checkpoint and job are printed. The checkpoint may belong to another run.
    From a checkpoint folder of Megatron-LM, the newest checkpoint is loaded. null starts without a checkpoint."""
    load_weights: str | None = None
    """Checkpoint directory from which a new run loads only weights. The run starts at iteration 0 with new optimizer
    state. The checkpoint may belong to another run, but must contain the job's model. Checkpoint folders of Megatron-LM
    and Hugging Face folders that ``tools/convert_checkpoint.py`` has converted are accepted. null: random weights."""
    trust: bool = False
    """Allow ``checkpoint.load`` and ``checkpoint.load_weights`` to name a checkpoint without this project's manifest.
    Loading such a checkpoint unpickles its metadata, so a malicious checkpoint can run code."""
    fully_parallel: bool = True
    """Divide the writing and reading of a checkpoint among the data-parallel ranks."""
    allow_other_data: bool = False
    """Allow a run to resume from its own checkpoint although the training data has changed."""

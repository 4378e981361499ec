"""Dense checkpoints in the format of Megatron's ``dist_checkpointing``, with a manifest that makes them complete."""

from megatron_ft.mcore.checkpoint.manager import CheckpointManager, LoadResult
from megatron_ft.mcore.checkpoint.state import TrainingState

__all__ = ["CheckpointManager", "LoadResult", "TrainingState"]

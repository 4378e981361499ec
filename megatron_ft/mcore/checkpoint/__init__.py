"""Dense checkpoints through Megatron's ``dist_checkpointing``, committed by the project's own manifest."""

from megatron_ft.mcore.checkpoint.manager import CheckpointManager, LoadResult
from megatron_ft.mcore.checkpoint.state import TrainingState

__all__ = ["CheckpointManager", "LoadResult", "TrainingState"]

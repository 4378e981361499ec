"""Dense checkpoints through Megatron's ``dist_checkpointing``, committed by a manifest of ours."""

from megatron_ft.mcore.checkpoint.manager import CheckpointManager, LoadResult
from megatron_ft.mcore.checkpoint.state import TrainingState

__all__ = ["CheckpointManager", "LoadResult", "TrainingState"]

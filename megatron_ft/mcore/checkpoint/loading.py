"""Reads the shards of a verified checkpoint with Megatron."""

import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint.optimizer_state import split_shards

_RANK_STATE_PREFIX = "rank_state"


def load_shards(
    frame: dict[str, Any],
    wanted: dict[str, Any],
    directory: Path,
    dp_cp_group: dist.ProcessGroup,
    *,
    fully_parallel: bool,
) -> dict[str, Any]:
    """Load the tensors that ``frame`` describes, the objects in ``wanted``, and the state that is common to all ranks.

    Args:
        frame: result of ``state.build_shards``: Megatron's description of the model and the optimizer.
        wanted: other sharded objects to load, by key.

    Returns:
        The loaded values by key; those of the optimizer are under ``optimizer_shards``.

    Raises:
        CheckpointError: the checkpoint lacks a tensor, or has a tensor that the model does not have.
    """
    request = {key: value for key, value in frame.items() if key != "optimizer"}
    request |= {"optimizer_shards": split_shards(frame["optimizer"]), **wanted}
    try:
        strategy = get_default_load_sharded_strategy(str(directory))
        if fully_parallel:
            strategy = FullyParallelLoadStrategyWrapper(strategy, dp_cp_group)
        # Megatron calls stored tensors that were not requested "missing", and requested ones not stored "unexpected".
        loaded, unclaimed, absent = dist_checkpointing.load(
            request, str(directory), sharded_strategy=strategy, strict=StrictHandling.RETURN_ALL
        )
    except (CheckpointingException, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    # Random number generators are requested only with the layout of the save.
    unclaimed = sorted(key for key in unclaimed if not key.startswith(_RANK_STATE_PREFIX))
    if absent or unclaimed:
        raise CheckpointError(
            f"{directory} does not match this model: the checkpoint lacks the tensors {sorted(absent)[:3]}, and the "
            f"model lacks the tensors {unclaimed[:3]} (the first 3 of each are shown)"
        )
    return loaded

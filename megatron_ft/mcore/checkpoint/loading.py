"""Reads shards of a verified checkpoint with Megatron."""

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
    """Load the model shards of ``frame``, ``wanted``, the optimizer's under ``optimizer_shards``, and the common state.

    Raises CheckpointError when the checkpoint lacks a tensor or has one that the model does not have.
    """
    request = {key: value for key, value in frame.items() if key != "optimizer"}
    request |= {"optimizer_shards": split_shards(frame["optimizer"]), **wanted}
    try:
        strategy = get_default_load_sharded_strategy(str(directory))
        if fully_parallel:
            strategy = FullyParallelLoadStrategyWrapper(strategy, dp_cp_group)
        # Megatron calls stored tensors without a request "missing", and requested tensors without storage "unexpected".
        loaded, unclaimed, absent = dist_checkpointing.load(
            request, str(directory), sharded_strategy=strategy, strict=StrictHandling.RETURN_ALL
        )
    except (CheckpointingException, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    # Generators are requested at the layout of the save only.
    unclaimed = sorted(key for key in unclaimed if not key.startswith(_RANK_STATE_PREFIX))
    if absent or unclaimed:
        raise CheckpointError(
            f"{directory}: does not fit this model: tensors are missing ({sorted(absent)[:3]}) or not part of the "
            f"model ({unclaimed[:3]})"
        )
    return loaded

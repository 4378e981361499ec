"""Complete training state of a run, and its form in a checkpoint."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint import optimizer_state
from megatron_ft.mcore.checkpoint.rng import restore_rng
from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.planning.commit import History

RANK_STATE_KEY = "rank_state"
OURS_KEY = "megatron_ft"


@dataclass(kw_only=True)
class DenseState:
    """State that is saved, and that a load fills: objects are changed in place, other fields are assigned."""

    model_chunks: list[torch.nn.Module]
    """Model chunks of this rank, wrapped or not, in virtual-pipeline order."""
    optimizer: MegatronOptimizer
    """Megatron's optimizer, distributed or not, chained or not."""
    scheduler: OptimizerParamScheduler
    """Scheduler of learning rate and weight decay, which depend on its position."""
    host: TrainState
    """State besides parameters and their optimizer state."""
    consumed_samples: int = 0
    """Number of consumed samples."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other state that is the same on all ranks: numbers, strings, lists, dicts and CPU tensors."""


def build_shards(state: DenseState, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    """Build ``{"model": ..., "optimizer": tree}``: Megatron's sharded description of weights and optimizer.

    Collective over the data-parallel groups (the distributed optimizer is gathered) unless loading.
    """
    model = {
        f"model{index}" if len(state.model_chunks) > 1 else "model": unwrap(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(state.model_chunks)
    }
    tree = optimizer_state.sharded_tree(state.optimizer, model, metadata, is_loading=is_loading)
    return {**model, "optimizer": tree}


def rank_state(host: TrainState | None = None) -> ShardedObject:
    """Make this rank's own state (the generators of ``host``) an object of the checkpoint; None for one to load."""
    world, rank = dist.get_world_size(), dist.get_rank()
    return ShardedObject(RANK_STATE_KEY, None if host is None else {"rng": host.rng}, (world,), (rank,), replica_id=0)


def common_state(state: DenseState) -> dict[str, Any]:
    """Return the state that is the same on all ranks and written once."""
    host = state.host
    # One loss scale is saved, whatever the number of optimizers, so that any layout can read it.
    scaler = dict(host.grad_scalers[0]) if host.grad_scalers else None
    history = {"losses": list(host.history.losses), "num_consecutive_skips": host.history.num_consecutive_skips}
    return {
        "iteration": host.iteration,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": state.scheduler.state_dict(),
        OURS_KEY: {
            "consumed_samples": state.consumed_samples,
            "optimizer_step": optimizer_state.step_count(state.optimizer),
            "grad_scaler": scaler,
            # History is under ``extra`` since the first format.
            "extra": {**state.extra, **history},
        },
    }


def install(state: DenseState, frame: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Fill ``state`` with the loaded values; ``frame`` is :func:`build_shards` of the live objects."""
    ours = loaded.get(OURS_KEY)
    if ours is None:
        ours = _foreign(loaded)
    for index, chunk in enumerate(state.model_chunks):
        key = f"model{index}" if len(state.model_chunks) > 1 else "model"
        unwrap(chunk).load_state_dict(loaded[key], strict=True)
    tree = optimizer_state.fill_frame(frame["optimizer"], loaded["optimizer_shards"])
    optimizer_state.install_state(state.optimizer, tree, step=ours["optimizer_step"], scaler=ours["grad_scaler"])
    # The position only: ``load_state_dict`` would also take rates and lengths from the checkpoint.
    state.scheduler.num_steps = 0
    state.scheduler.step(increment=loaded["opt_param_scheduler"]["num_steps"])
    if RANK_STATE_KEY in loaded:
        restore_rng(loaded[RANK_STATE_KEY]["rng"])
    state.extra = dict(ours["extra"])
    history = History(
        losses=tuple(state.extra.pop("losses", ())),
        num_consecutive_skips=state.extra.pop("num_consecutive_skips", 0),
    )
    state.host = TrainState.capture(state.model_chunks, state.optimizer, iteration=loaded["iteration"], history=history)
    state.consumed_samples = ours["consumed_samples"]


def _foreign(loaded: dict[str, Any]) -> dict[str, Any]:
    try:
        optimizer = loaded["optimizer"]
        first = optimizer.get(0, optimizer)
        inner = first.get("optimizer", first)
        step = (
            inner["state"]["common_step"]
            if "common_step" in inner.get("state", {})
            else inner["param_groups"][0]["step"]
        )
        return {
            "consumed_samples": int(loaded["args"].consumed_train_samples) if "args" in loaded else 0,
            "optimizer_step": int(step),
            "grad_scaler": first.get("grad_scaler"),
            "extra": {},
        }
    except (KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"a checkpoint of another project lacks an entry that resuming needs: {error!r}"
        ) from error

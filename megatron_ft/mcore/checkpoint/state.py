"""The complete training state of a run, and its representation in a checkpoint."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint.files import RANK_STATE_KEY, Addresses
from megatron_ft.mcore.model.parameters import unwrap
from megatron_ft.mcore.optimizer import adamw
from megatron_ft.mcore.state.train_state import TrainState, restore_rng
from megatron_ft.planning.iteration import History

OURS_KEY = "megatron_ft"


@dataclass(kw_only=True)
class DenseState:
    """Complete state of one rank, which a save reads. A load changes model and optimizer in place, and sets the other
    fields."""

    model_chunks: list[torch.nn.Module]
    """Model chunks of this rank, in the order of virtual pipeline stages. They may be wrapped for data parallelism."""
    optimizer: MegatronOptimizer
    """Any optimizer of Megatron, including chained and distributed ones."""
    scheduler: OptimizerParamScheduler
    """Scheduler of learning rate and weight decay."""
    host: TrainState
    """State besides parameters and optimizer state."""
    consumed_samples: int = 0
    """Number of consumed samples."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other state that is the same on all ranks: numbers, strings, lists, dicts and CPU tensors."""

    def build_shards(self, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """Build Megatron's sharded description of model and optimizer, with the keys ``model`` and ``optimizer``. With
        several model chunks, the keys are ``model0``, ``model1`` and so on. Unless ``is_loading``, the
        shards refer to the present tensors."""
        model = {
            f"model{index}" if len(self.model_chunks) > 1 else "model": unwrap(chunk).sharded_state_dict(
                metadata=metadata
            )
            for index, chunk in enumerate(self.model_chunks)
        }
        tree = adamw.sharded_tree(self.optimizer, model, metadata, is_loading=is_loading)
        return {**model, "optimizer": tree}

    def addresses(self) -> Addresses:
        """Return the addresses of the memory of all parameters, buffers and optimizer state of this rank."""
        chunks = [unwrap(chunk) for chunk in self.model_chunks]
        tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        for member in adamw.sub_optimizers(self.optimizer):
            tensors += [master for _, master in adamw.masters_of(member)]
            tensors += [
                value for state in member.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
            ]
        return tuple(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def common_state(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks and is written only once."""
        host = self.host
        # Only one loss scale is saved, because another layout may have another number of optimizers.
        scaler = dict(host.grad_scalers[0]) if host.grad_scalers else None
        history = {**host.history.to_json(), "losses": list(host.history.losses)}
        return {
            "iteration": host.iteration,
            "checkpoint_version": 3.0,
            "opt_param_scheduler": self.scheduler.state_dict(),
            OURS_KEY: {
                "consumed_samples": self.consumed_samples,
                "optimizer_step": adamw.step_count(self.optimizer),
                "grad_scaler": scaler,
                # In the checkpoint format, the history is a part of ``extra``.
                "extra": {**self.extra, **history},
            },
        }


def rank_state(host: TrainState | None = None) -> ShardedObject:
    """Return the checkpoint object that contains this rank's random number generators from ``host``. With
    ``host=None``, return an empty object, which a load fills."""
    world, rank = dist.get_world_size(), dist.get_rank()
    return ShardedObject(RANK_STATE_KEY, None if host is None else {"rng": host.rng}, (world,), (rank,), replica_id=0)


def install(state: DenseState, frame: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Fill ``state`` with the ``loaded`` values. ``frame`` is the result of :meth:`DenseState.build_shards` of
    ``state``."""
    ours = loaded.get(OURS_KEY)
    if ours is None:
        ours = _foreign(loaded)
    for index, chunk in enumerate(state.model_chunks):
        key = f"model{index}" if len(state.model_chunks) > 1 else "model"
        unwrap(chunk).load_state_dict(loaded[key], strict=True)
    tree = adamw.fill_frame(frame["optimizer"], loaded["optimizer_shards"])
    adamw.install_state(state.optimizer, tree, step=ours["optimizer_step"], scaler=ours["grad_scaler"])
    # Only the position is loaded. ``load_state_dict`` would also load learning rates and the length of the schedule.
    state.scheduler.num_steps = 0
    state.scheduler.step(increment=loaded["opt_param_scheduler"]["num_steps"])
    if RANK_STATE_KEY in loaded:
        restore_rng(loaded[RANK_STATE_KEY]["rng"])
    state.extra = dict(ours["extra"])
    known = {"losses": (), "num_consecutive_skips": 0, "tokens": None}
    history = History.from_json({name: state.extra.pop(name, default) for name, default in known.items()})
    state.host = TrainState.capture(state.model_chunks, state.optimizer, iteration=loaded["iteration"], history=history)
    state.consumed_samples = ours["consumed_samples"]


def _foreign(loaded: dict[str, Any]) -> dict[str, Any]:
    try:
        loaded["iteration"], loaded["opt_param_scheduler"]["num_steps"]  # checked here, and read later
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
            f"this checkpoint of another project cannot be loaded, because it lacks an entry: {error!r}"
        ) from error

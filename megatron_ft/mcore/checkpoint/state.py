"""Describes the complete training state of a run for a checkpoint, and loads it from a checkpoint."""

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ft.errors import CheckpointError
from megatron_ft.formatting import unlike_tensors
from megatron_ft.mcore.checkpoint.files import RANK_STATE_KEY, SavedTensors
from megatron_ft.mcore.checkpoint.metadata import load_metadata, read_common
from megatron_ft.mcore.model.transformer_config import named_parameters, unwrap
from megatron_ft.mcore.optimizer import adamw
from megatron_ft.mcore.optimizer.adamw import SHARDING_METADATA, split_shards
from megatron_ft.mcore.state.train_state import TrainState, restore_rng
from megatron_ft.planning.iteration import History
from transformer_engine_ext.recipes import AMAX_HISTORY

OURS_KEY = "megatron_ft"


@dataclass(kw_only=True)
class DenseState:
    """Complete training state of one rank. A save reads it. A load changes model, optimizer and scheduler in place, and
    sets ``host``, ``extra`` and ``consumed_samples``."""

    model_chunks: list[torch.nn.Module]
    """Model chunks of this rank, in the order of virtual pipeline stages. They may be wrapped for data parallelism."""
    optimizer: MegatronOptimizer
    """Any optimizer of Megatron, including chained and distributed ones."""
    scheduler: OptimizerParamScheduler
    """Scheduler of learning rate and weight decay."""
    host: TrainState
    """State besides the tensors of model and optimizer, e.g. the iteration and random number generators."""
    consumed_samples: int = 0
    """Number of training samples that the run has consumed."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional state that is the same on all ranks: numbers, strings, lists, dicts and CPU tensors."""
    before_update: list[Callable[[], None]] | None = None
    """Functions that the engine calls before it updates the state. A save can then copy the state during the iteration:
    it adds a function that waits for the copies. With None, a save copies the state at once."""

    def build_shards(self, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """Build Megatron's sharded state dicts of model and optimizer, with the keys ``model`` and ``optimizer``. With
        several model chunks, the keys are ``model0``, ``model1`` and so on. With ``is_loading``, the shards are
        the targets of a load, and those of the optimizer may contain no tensors."""
        model = {
            f"model{index}" if len(self.model_chunks) > 1 else "model": unwrap(chunk).sharded_state_dict(
                metadata=metadata
            )
            for index, chunk in enumerate(self.model_chunks)
        }
        tree = adamw.sharded_tree(self.optimizer, model, metadata, is_loading=is_loading)
        return {**model, "optimizer": tree}

    def tensors(self) -> SavedTensors:
        """Return the names and addresses of the tensors of this rank."""
        names = tuple(name for chunk in self.model_chunks for name, _ in named_parameters(chunk))
        chunks = [unwrap(chunk) for chunk in self.model_chunks]
        tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        for member in adamw.sub_optimizers(self.optimizer):
            tensors += [master for _, master in adamw.masters_of(member)]
            tensors += [
                value for state in member.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
            ]
        return SavedTensors(names, tuple(tensor.untyped_storage().data_ptr() for tensor in tensors))

    def buffers(self) -> frozenset[int]:
        """Return the addresses of the memory of the buffers, which forward passes may change."""
        tensors = [tensor for chunk in self.model_chunks for tensor in unwrap(chunk).buffers()]
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def common_state(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks, so that only one rank writes it."""
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
    """Fill ``state`` with the values in ``loaded``. ``frame`` is the result of ``state.build_shards``."""
    ours = loaded.get(OURS_KEY)
    if ours is None:
        ours = _foreign(loaded)
    for index, chunk in enumerate(state.model_chunks):
        key = f"model{index}" if len(state.model_chunks) > 1 else "model"
        unwrap(chunk).load_state_dict(with_histories(chunk, loaded[key]), strict=True)
    tree = adamw.fill_frame(frame["optimizer"], loaded["optimizer_shards"])
    adamw.install_state(state.optimizer, tree, step=ours["optimizer_step"], scaler=ours["grad_scaler"])
    # Load only the position. ``load_state_dict`` would also load learning rates and the length of the schedule.
    state.scheduler.num_steps = 0
    state.scheduler.step(increment=loaded["opt_param_scheduler"]["num_steps"])
    if RANK_STATE_KEY in loaded:
        restore_rng(loaded[RANK_STATE_KEY]["rng"])
    state.extra = dict(ours["extra"])
    known = {"losses": (), "num_consecutive_skips": 0, "tokens": None}
    history = History.from_json({name: state.extra.pop(name, default) for name, default in known.items()})
    state.host = TrainState.capture(state.model_chunks, state.optimizer, iteration=loaded["iteration"], history=history)
    state.consumed_samples = ours["consumed_samples"]


_RANK_STATE_PREFIX = "rank_state"
_SHARDING_TYPE = "distrib_optim_sharding_type"
_OF_ONE_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def layout_of(directory: Path, *, weights_only: bool) -> dict[str, bool]:
    """Return Megatron's metadata for loading a checkpoint of another project: whether each layer and each expert has
    tensors of its own. In Megatron-LM's checkpoints, one tensor can contain a weight of all layers or experts.

    Raises:
        CheckpointError: the checkpoint cannot be read; or ``weights_only`` is false, and the optimizer state is missing
            or has a format that depends on the layout of the ranks.
    """
    common, names = read_common(directory), load_metadata(directory).state_dict_metadata.keys()
    kind = (common.get("content_metadata") or {}).get(_SHARDING_TYPE)
    if not weights_only and "optimizer" not in common:
        raise CheckpointError(f"{directory}: contains only weights; set checkpoint.load_weights instead")
    if not weights_only and kind not in (None, SHARDING_METADATA[_SHARDING_TYPE]):
        raise CheckpointError(
            f"{directory}: its optimizer state has Megatron's format {kind}, which can be loaded only with the "
            "parallel layout of its save. Save it in Megatron-LM with --dist-ckpt-optim-fully-reshardable, or load "
            "only the weights (checkpoint.load_weights)"
        )
    return {
        "singleton_local_shards": any(map(_OF_ONE_EXPERT.search, names)),
        "non_homogeneous_layers": any(map(_OF_ONE_LAYER.match, names)),
    }


def other_shape(frame: dict[str, Any], directory: Path) -> str | None:
    """Return an error if an embedding or head has other shapes in the checkpoint and in ``frame``, otherwise None.
    Without this error, Megatron would load the rows that exist in both shapes, and leave zeros in all other rows."""
    shards = [
        shard for shard in nested_values(frame) if isinstance(shard, ShardedTensor) and shard.allow_shape_mismatch
    ]
    stored = load_metadata(directory).state_dict_metadata if shards else {}
    for shard in shards:
        size = getattr(stored.get(shard.key), "size", shard.global_shape)
        if tuple(size) != tuple(shard.global_shape):
            return (
                f"{directory}: {shard.key} has the shape {list(size)}, but the model has {list(shard.global_shape)}; "
                "set model.vocab_size and model.make_vocab_size_divisible_by to those of the checkpoint"
            )
    return None


def leave_histories(shards: dict[str, Any], directory: Path) -> None:
    """Remove histories of delayed scaling (FP8) from ``shards``, Megatron's description of a model chunk, unless the
    checkpoint has them in the same shape. A checkpoint of only weights has none, and a changed FP8 recipe can change
    their shape. The model then starts with empty histories."""
    histories = [name for name in shards if name.endswith(AMAX_HISTORY)]
    stored = load_metadata(directory).state_dict_metadata if histories else {}
    for name in histories:
        shard = shards[name]
        if tuple(getattr(stored.get(shard.key), "size", ())) != tuple(shard.global_shape):
            del shards[name]


def with_histories(chunk: torch.nn.Module, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``loaded``, the tensors of ``chunk``, with the chunk's own FP8 amax histories if ``loaded`` lacks them."""
    present = unwrap(chunk).state_dict()
    return {**{name: found for name, found in present.items() if name.endswith(AMAX_HISTORY)}, **loaded}


def load_shards(
    frame: dict[str, Any],
    wanted: dict[str, Any],
    directory: Path,
    dp_cp_group: dist.ProcessGroup,
    *,
    fully_parallel: bool,
    ignored: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Load the tensors that ``frame`` describes, the objects in ``wanted``, and the state that is common to all ranks.

    Args:
        frame: result of ``DenseState.build_shards``: Megatron's description of the model and the optimizer.
        wanted: sharded objects to load besides ``frame``, by key.
        ignored: beginnings of keys that the checkpoint may have although the model does not have them.

    Returns:
        The loaded values by key. The optimizer's values are under the key ``optimizer_shards``.

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
    # Random number generators are requested only if the layout is that of the save, so they may be unclaimed.
    unclaimed = sorted(
        key
        for key in unclaimed
        if not key.startswith((_RANK_STATE_PREFIX, *ignored)) and not key.endswith(AMAX_HISTORY)
    )
    if absent or unclaimed:
        raise CheckpointError(f"{directory} does not match this model: {unlike_tensors(absent, unclaimed)}")
    return loaded


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

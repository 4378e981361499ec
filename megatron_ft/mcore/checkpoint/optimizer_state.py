"""Separates the tensors of an optimizer's sharded state from its other values.

The distributed optimizer is stored in Megatron's format ``fully_reshardable``: its flat buffers are gathered over the
data-parallel ranks and divided into tensors with the shapes of the parameters. So a job with other TP, PP, EP or DP
sizes can load the same numbers. Master weights and moments are stored in FP32, without rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

SHARDING_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # With True, one rank of each data-parallel group would gather the state, which needs additional gloo groups.
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""Metadata that determines how Megatron lays out the optimizer in a checkpoint."""


def sub_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers in ``optimizer`` that have parameters, in order."""
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [member for member in chain if member.optimizer is not None]


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Create the moments and step counts that the first update would create, with the same values: zeros."""
    for member in sub_optimizers(optimizer):
        # Megatron's function creates moments without a step count, and AdamW does not add one later.
        member.init_state_fn(member.optimizer, member.config)
        if isinstance(member.optimizer, torch.optim.Adam):  # includes AdamW
            for state in member.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def step_count(optimizer: MegatronOptimizer) -> int:
    """Return the number of updates, which must be the same for every parameter."""
    steps = {int(step) for member in sub_optimizers(optimizer) for step in _steps(member)}
    assert len(steps) <= 1, f"parameters have different numbers of updates: {sorted(steps)}"
    return steps.pop() if steps else 0


def _steps(member: MegatronOptimizer) -> Iterator[Any]:
    if isinstance(member.optimizer, torch.optim.Adam):
        yield from (state["step"] for state in member.optimizer.state.values())
    else:  # fused optimizers count per group
        yield from (group["step"] for group in member.optimizer.param_groups if group["params"] and "step" in group)


def sharded_tree(
    optimizer: MegatronOptimizer, model_shards: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool
) -> Any:
    """Build Megatron's nested description of the optimizer's state, whose leaves are shards, numbers or strings."""
    allocate_state(optimizer)
    return optimizer.sharded_state_dict(model_shards, is_loading, metadata=metadata)


def split_shards(tree: Any) -> dict[str, ShardedBase]:
    """Return the shards of ``tree`` by their path."""
    return {"/".join(path): leaf for path, leaf in _leaves(tree, ()) if isinstance(leaf, ShardedBase)}


def fill_frame(tree: Any, loaded: dict[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Return ``tree`` with each shard replaced by the value in ``loaded`` for its path."""
    if isinstance(tree, dict):
        return {key: fill_frame(value, loaded, (*path, str(key))) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(fill_frame(value, loaded, (*path, str(index))) for index, value in enumerate(tree))
    if isinstance(tree, LocalNonpersistentObject):
        return tree.unwrap()
    return loaded["/".join(path)] if isinstance(tree, ShardedBase) else tree


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, tree


def install_state(optimizer: MegatronOptimizer, tree: Any, *, step: int, scaler: dict[str, Any] | None) -> None:
    """Set the optimizer's state from ``tree``, the result of :func:`fill_frame`, and its step count and loss scale.
    Learning rate, weight decay and similar values are not changed: the configuration and the scheduler determine
    them."""
    members = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    frames = [tree] if len(members) == 1 else [tree[index] for index in range(len(members))]
    for member, frame in zip(members, frames, strict=True):
        if member.optimizer is not None:
            _install_member(member, frame, step, scaler)


def _install_member(member: MegatronOptimizer, frame: dict[str, Any], step: int, scaler: dict[str, Any] | None) -> None:
    tensors = frame.pop("param_state", None)
    _set_step(member, frame, step)
    member.load_state_dict(frame)
    _own_steps(member, step)
    if tensors is not None:
        with _steps_put_away(member):
            member.load_parameter_state_from_fully_reshardable(tensors)
    if scaler is not None and getattr(member, "grad_scaler", None):
        member.grad_scaler.load_state_dict(scaler)


@contextmanager
def _steps_put_away(member: MegatronOptimizer) -> Iterator[None]:
    """Remove the step counts during a load. Megatron would look for each entry of the optimizer's state in the stored
    tensors, which have no step counts."""
    states = list(member.optimizer.state.values())
    steps = [state.pop("step", None) for state in states]
    try:
        yield
    finally:
        for state, step in zip(states, steps, strict=True):
            if step is not None:
                state["step"] = step


def _set_step(member: MegatronOptimizer, frame: dict[str, Any], step: int) -> None:
    inner = frame.get("optimizer", frame)
    for group in inner["param_groups"]:
        if isinstance(member, DistributedOptimizer) or "step" in group:
            group["step"] = step
    if not isinstance(member, DistributedOptimizer) and isinstance(member.optimizer, torch.optim.Adam):
        inner["state"]["common_step"] = torch.tensor(float(step), dtype=torch.float32)


def _own_steps(member: MegatronOptimizer, step: int) -> None:
    """Give each parameter its own step tensor, and remove the step counts of parameter groups. Megatron's load gives
    all parameters the same tensor, which each parameter's update would increase. It also leaves step counts in the
    groups, which no update would increase."""
    if isinstance(member.optimizer, torch.optim.Adam):
        for state in member.optimizer.state.values():
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
        for group in member.optimizer.param_groups:
            group.pop("step", None)

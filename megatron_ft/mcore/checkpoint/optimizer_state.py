"""Splits an optimizer's state, as Megatron shards it, into tensors to store and all other values.

The distributed optimizer is stored ``fully_reshardable``: its flat buffers are gathered over the data-parallel ranks
and cut into tensors shaped like the model's, so another TP, PP, EP or DP size reads the same numbers. Masters and
moments are FP32 copies: nothing is rounded.
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
    # True would gather to one rank of each data-parallel group, over gloo groups beside NCCL's.
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""Megatron's metadata for the layout of the optimizer in a checkpoint."""


def sub_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """List the optimizers inside ``optimizer`` that own parameters, in order."""
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [member for member in chain if member.optimizer is not None]


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Create the moments and step counts that the first update would create: zeros, so no bit changes."""
    for member in sub_optimizers(optimizer):
        # Megatron's function makes moments without a step count, and AdamW then adds none.
        member.init_state_fn(member.optimizer, member.config)
        if isinstance(member.optimizer, torch.optim.Adam):  # AdamW is one as well
            for state in member.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def step_count(optimizer: MegatronOptimizer) -> int:
    """Return the number of applied updates, the same for every parameter."""
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
    """Build Megatron's nested description of the optimizer's state; leaves are shards, numbers or strings."""
    allocate_state(optimizer)
    return optimizer.sharded_state_dict(model_shards, is_loading, metadata=metadata)


def split_shards(tree: Any) -> dict[str, ShardedBase]:
    """Collect the shards of ``tree`` by their path."""
    return {"/".join(path): leaf for path, leaf in _leaves(tree, ()) if isinstance(leaf, ShardedBase)}


def fill_frame(tree: Any, loaded: dict[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Return ``tree`` with the shard at each path replaced by the value loaded for it."""
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
    """Set the optimizer's state from ``tree`` (from :func:`fill_frame`), its step count and loss scale.

    Learning rate, weight decay and similar values keep their present values: the configuration and the scheduler set
    them.
    """
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
    """Remove step counts during a load: Megatron copies every entry of the inner state from the stored tensors, which
    lack them."""
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
    """Give each parameter a separate step tensor: Megatron's load gives all of them the same object, which the update
    of every parameter would advance. Remove the step that it leaves in the groups, which would become stale."""
    if isinstance(member.optimizer, torch.optim.Adam):
        for state in member.optimizer.state.values():
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
        for group in member.optimizer.param_groups:
            group.pop("step", None)

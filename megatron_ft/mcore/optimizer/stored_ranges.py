"""Describes the state of a sharded optimizer for a checkpoint without gathering it.

A rank updates a contiguous range of each flattened parameter. A checkpoint contains tensors with the shapes of the
parameters, and with the names of Megatron's format ``fully_reshardable``. This module cuts each range into boxes
(hyperrectangles) of such a tensor. So each rank writes and reads only its own range, and jobs of all TP, PP, EP and DP
sizes can read the tensors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

_STATES = ("param", "exp_avg", "exp_avg_sq")
"""Megatron's names of the stored FP32 tensors of a parameter: the master weight and the moments."""


@dataclass(frozen=True, slots=True)
class Box:
    """Hyperrectangle in a tensor, with elements that are contiguous in memory."""

    offset: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Number of indices in each dimension."""

    @property
    def num_elements(self) -> int:
        """Number of elements in the box."""
        return prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the elements ``start`` to ``stop`` (exclusive) of a flattened tensor into boxes, in order. For n dimensions,
    there are at most 2n - 1 boxes. Nothing is yielded for an empty range."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = start // row, -(-stop // row)
    if last - first == 1 and stop - start < row:  # a part of one row
        for inner in boxes(shape[1:], start - first * row, stop - first * row):
            yield Box((first, *inner.offset), (1, *inner.sizes))
        return
    if start % row:
        yield from boxes(shape, start, (first + 1) * row)
        first += 1
    if stop % row:
        last -= 1
    if last > first:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if stop % row:
        yield from boxes(shape, last * row, stop)


def shards_of_range(
    whole: ShardedTensor | ShardedTensorFactory, start: int, stop: int, data: torch.Tensor | None, *, is_shared: bool
) -> list[ShardedTensor]:
    """Return checkpoint shards (boxes) that together cover a range of a flattened parameter, in order of the elements.

    Args:
        whole: Megatron's description of the whole parameter, whose ``data`` is the parameter.
        start: first element of the range.
        stop: index after the last element of the range.
        data: values of the range, one-dimensional; None for shards that a load fills.
        is_shared: whether other ranks have other ranges of this parameter. If so, each rank writes its own range.
    """
    found, position = [], 0
    for part in [whole.build()] if isinstance(whole, ShardedTensorFactory) else [whole]:
        for shard in nested_values(part) if isinstance(part, dict | list) else [part]:
            _check_position(shard, whole.data, position)
            first, last = (min(max(end - position, 0), shard.data.numel()) for end in (start, stop))
            found += _cut(shard, first, last, data, position - start, is_shared=is_shared)
            position += shard.data.numel()
    if position != whole.data.numel():
        raise AssertionError(f"{whole.key}: its shards have {position} of {whole.data.numel()} elements")
    return found


def _check_position(shard: ShardedTensor, parameter: torch.Tensor, position: int) -> None:
    # Factories cut a parameter into views. A range of the parameter consists of ranges of the views only if the views
    # follow each other in memory.
    view = shard.data
    if view.data_ptr() != parameter.data_ptr() + position * parameter.element_size() or not view.is_contiguous():
        raise AssertionError(f"{shard.key}: is not a contiguous part of its parameter from element {position}")


def _cut(
    shard: ShardedTensor, first: int, last: int, data: torch.Tensor | None, shift: int, *, is_shared: bool
) -> Iterator[ShardedTensor]:
    at = first + shift
    # In Megatron-LM's checkpoints, a tensor may have axes for layers and experts before the axes of the parameter.
    # Megatron adds these axes itself only if all parts have equal sizes, so here each part has them, with size 1.
    num_axes = shard.prepend_axis_num
    for box in boxes(shard.local_shape, first, last):
        sizes, offset = (1,) * num_axes + box.sizes, (0,) * num_axes + box.offset
        values = None if data is None else data[at : at + box.num_elements].view(sizes)
        at += box.num_elements
        yield replace(
            shard,
            data=values,
            dtype=torch.float32,
            local_shape=sizes,
            prepend_axis_num=0,
            global_offset=tuple(map(sum, zip(shard.global_offset, offset, strict=True))),
            axis_fragmentations=None,
            replica_id=(*shard.replica_id[:-1], 0) if is_shared else shard.replica_id,
        )


@contextmanager
def own_ranges(optimizers: Sequence[MegatronOptimizer]) -> Iterator[None]:
    """Make Megatron's ``sharded_state_dict`` describe only the ranges of this rank while the block runs. Otherwise,
    Megatron would gather the state of all data-parallel ranks, 12 bytes for each parameter of the rank."""
    sharded = [member for member in optimizers if isinstance(member, DistributedOptimizer)]
    for member in sharded:
        member.sharded_param_state_fully_reshardable = partial(_describe, member)
    # Megatron's garbage collection is disabled: it takes longer than the description and would block training.
    collector, distrib_optimizer.gc = distrib_optimizer.gc, SimpleNamespace(collect=lambda: 0)
    try:
        yield
    finally:
        distrib_optimizer.gc = collector
        for member in sharded:
            del member.sharded_param_state_fully_reshardable


def _describe(
    member: DistributedOptimizer, model_shards: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Return the shards of this rank's ranges, by index of the parameter (see ``_ranges``) and name of the tensor. The
    form of the result is that of Megatron's method."""
    tensors, _ = extract_sharded_tensors_and_factories(model_shards)
    described = {shard.data: shard for shard in nested_values(tensors)}
    is_shared = member.data_parallel_group.size() > 1
    found = {}
    for number, parameter, start, stop in _ranges(member):
        state, whole = member._get_main_param_and_optimizer_states(parameter), described[parameter]
        found[number] = {
            name: shards_of_range(
                replace(whole, key=f"optimizer.state.{name}.{whole.key}"),
                start,
                stop,
                None if is_loading else state[name].detach().view(-1),
                is_shared=is_shared,
            )
            for name in _STATES
        }
    return found


@torch.no_grad()
def install_ranges(member: DistributedOptimizer, loaded: dict[Any, dict[str, list[torch.Tensor]]]) -> None:
    """Copy loaded values into the state of a sharded optimizer. ``loaded`` has the form of ``_describe``'s result, with
    tensors instead of shards."""
    for number, parameter, _, _ in _ranges(member):
        state = {name: torch.cat([part.reshape(-1) for part in loaded[number][name]]) for name in _STATES}
        member._set_main_param_and_optimizer_states(parameter, state)


def _ranges(member: DistributedOptimizer) -> Iterator[tuple[int, torch.nn.Parameter, int, int]]:
    """Yield (number, parameter, start, stop) for each range [start, stop) that this rank updates. Parameters are
    numbered in the order of Megatron's buffers. Parameters of which this rank updates no element are numbered, too."""
    number = 0
    for buffer, maps in zip(member.buffers, member.gbuf_ranges, strict=True):
        buckets = [bucket["param_map"] for by_dtype in maps.values() for bucket in by_dtype]
        for parameter in buffer.param_index_map:
            for bucket in buckets:
                if parameter in bucket:
                    found = bucket[parameter]["param"]
                    yield number, parameter, found.start, found.end
            number += 1

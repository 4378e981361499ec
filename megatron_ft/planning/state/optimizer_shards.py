"""Computes the elements that Megatron-Core's distributed optimizer updates on each data-parallel rank.

A buffer contains parameters in the reverse order of the module. It consists of buckets, and every bucket is cut into
equal parts, one for each data-parallel rank (``_ParamAndGradBuffer`` and
``DistributedOptimizer._build_model_gbuf_range`` of Megatron-Core 0.16.1).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.intervals import distinct
from megatron_ft.planning.state.tensors import Column

# Values of Megatron: for elements of at least 16 bits, buckets begin at multiples of 256 bytes and parameters at
# multiples of 128 bytes.
BUCKET_MULTIPLE = 128
"""The size of every bucket is a multiple of this number of elements and of the number of data-parallel ranks."""
PARAMETER_MULTIPLE = 64
"""Every parameter starts at a multiple of this number of elements."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardRanges:
    """Ranges of parameter elements that data-parallel ranks update, as columns in the order of the buffer."""

    shard: Column
    """Data-parallel rank that updates the range."""
    parameter: Column
    """Number of the parameter among the buffer's parameters, in the order of the module."""
    start: Column
    """First element of the range in the flattened parameter."""
    stop: Column

    @classmethod
    def even(cls, sizes: Sequence[int], num_shards: int) -> "ShardRanges":
        """Cut concatenated parameters, which have ``sizes`` elements, into shards whose sizes differ by at most one."""
        stops = np.cumsum(np.array(sizes, dtype=np.int64))
        ranges = np.stack([stops - sizes, stops], axis=1) if len(sizes) else np.zeros((0, 2), dtype=np.int64)
        total = int(stops[-1]) if len(sizes) else 0
        return _cut(ranges, total * np.arange(num_shards, dtype=np.int64) // num_shards, num_shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """Ranges of elements that the parameters and buckets of one buffer occupy.

    A running rank reads them from Megatron's buffer: ``ranges`` from its ``param_index_map`` in the order of its
    ``params``, and ``buckets`` from its ``bucket_indices``.
    """

    ranges: tuple[tuple[int, int], ...]
    """Range of each parameter, in the order of the module."""
    buckets: tuple[tuple[int, int], ...]
    """Range of each bucket including its padding; a bucket begins where the previous one ends."""

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        *,
        padded_for: Sequence[int],
        bucket_size: int | None = None,
        alone: Collection[int] = (),
    ) -> "BufferLayout":
        """Return the layout that Megatron-Core gives to a buffer of parameters.

        Args:
            sizes: number of elements of each parameter, in the order of the module.
            padded_for: data-parallel sizes that must divide every bucket size; Megatron uses only the current one.
            bucket_size: number of elements at which a bucket is full; None for one bucket.
            alone: numbers of the parameters that get a separate bucket, such as embeddings that two stages share.
        """
        # Because of the padding for further sizes, a buffer does not change if the number of lanes changes.
        multiple = math.lcm(*padded_for, BUCKET_MULTIPLE)
        ranges: list[tuple[int, int]] = [(0, 0)] * len(sizes)
        buckets: list[tuple[int, int]] = []
        bucket_start = stop = 0
        is_open = False

        def close(end: int) -> int:
            nonlocal bucket_start, is_open
            buckets.append((bucket_start, _padded(end, multiple)))
            bucket_start, is_open = buckets[-1][1], False
            return bucket_start

        # Gradients are complete in the reverse order of the forward pass, so the first bucket can be reduced first.
        for place in reversed(range(len(sizes))):
            start = _padded(stop, PARAMETER_MULTIPLE)
            if place in alone and is_open:
                start = close(start)
            stop = start + sizes[place]
            ranges[place], is_open = (start, stop), True
            if place in alone or (bucket_size is not None and stop - bucket_start >= bucket_size):
                stop = close(stop)
        if is_open:
            close(stop)
        return cls(ranges=tuple(ranges), buckets=tuple(buckets))

    def shards(self, num_shards: int) -> ShardRanges:
        """Cut every bucket into equal parts for ``num_shards`` data-parallel ranks.

        Raises:
            ConfigError: the size of a bucket is not a multiple of ``num_shards``.
        """
        for start, stop in self.buckets:
            if (stop - start) % num_shards:
                raise ConfigError.of(
                    "num_shards", num_shards, f"must divide the size of every bucket; one has {stop - start} elements"
                )
        buckets = np.array(self.buckets, dtype=np.int64).reshape(-1, 2)
        steps = (buckets[:, 1] - buckets[:, 0]) // num_shards
        # Every bucket is cut separately, so that each rank has an equal part of each reduce-scatter.
        edges = (buckets[:, :1] + steps[:, None] * np.arange(num_shards)).ravel()
        return _cut(np.array(self.ranges, dtype=np.int64).reshape(-1, 2), edges, num_shards)


def _cut(ranges: Column, edges: Column, num_shards: int) -> ShardRanges:
    """Cut the parameter ranges ``[parameters, 2]`` at ``edges``; edge ``i`` is a start of shard ``i % num_shards``."""
    places = np.argsort(ranges[:, 0], kind="stable")
    ranges = ranges[places]
    points = distinct(np.concatenate([edges, ranges.ravel()]))
    starts, stops = points[:-1], points[1:]
    parameter = np.searchsorted(ranges[:, 0], starts, side="right") - 1
    inside = (parameter >= 0) & (starts < ranges[parameter, 1])
    starts, stops, parameter = starts[inside], stops[inside], parameter[inside]
    first = ranges[parameter, 0]
    return ShardRanges(
        shard=((np.searchsorted(edges, starts, side="right") - 1) % num_shards).astype(np.int64),
        parameter=places[parameter].astype(np.int64),
        start=starts - first,
        stop=stops - first,
    )


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

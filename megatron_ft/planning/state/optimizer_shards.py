"""Elements that the distributed optimizer updates on each data-parallel rank: Megatron-Core's buffers, in numbers.

A buffer contains parameters in reverse order. It consists of buckets, and every bucket is cut into equal parts, one for
each data-parallel rank (``_ParamAndGradBuffer`` and ``DistributedOptimizer._build_model_gbuf_range``, 0.16.1).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.intervals import distinct
from megatron_ft.planning.state.tensors import Column

# Both are Megatron's: buckets begin at multiples of 256 bytes and parameters of 128, for values of at least 16 bits.
BUCKET_MULTIPLE = 128
"""The size of every bucket is a multiple of this and of the number of data-parallel ranks."""
PARAMETER_MULTIPLE = 64
"""Every parameter starts at a multiple of this number of elements."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardRanges:
    """Element ranges of parameters by data-parallel rank, as columns in order of the buffer."""

    shard: Column
    """Data-parallel rank."""
    parameter: Column
    """Position among the buffer's parameters, in the order of the module."""
    start: Column
    """First element, in the flattened parameter."""
    stop: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """Ranges of one buffer's parameters and buckets, in elements.

    A living rank reads it from its buffer: ``param_index_map`` in the order of ``params``, and ``bucket_indices``.
    """

    ranges: tuple[tuple[int, int], ...]
    """Range of each parameter, in the order of the module."""
    buckets: tuple[tuple[int, int], ...]
    """Range of each bucket with its padding, end to end."""

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        *,
        padded_for: Sequence[int],
        bucket_size: int | None = None,
        alone: Collection[int] = (),
    ) -> "BufferLayout":
        """Return the layout that Megatron-Core gives to parameters.

        Args:
            sizes: elements of each parameter, in the order of the module.
            padded_for: data-parallel sizes for which every bucket can be cut; Megatron uses only the present one.
            bucket_size: elements after which a bucket is full; None for one bucket.
            alone: positions of parameters with a separate bucket: embeddings that two stages share.
        """
        # Padding for further sizes lets a buffer stay as it is when the number of lanes changes.
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
        """Cut every bucket for ``num_shards`` data-parallel ranks.

        Raises:
            ConfigError: the size of a bucket is not a multiple of it.
        """
        for start, stop in self.buckets:
            if (stop - start) % num_shards:
                raise ConfigError.of(
                    "num_shards", num_shards, f"must divide the size of every bucket; one has {stop - start} elements"
                )
        buckets = np.array(self.buckets, dtype=np.int64).reshape(-1, 2)
        steps = (buckets[:, 1] - buckets[:, 0]) // num_shards
        # Every bucket is cut for itself: a rank has a part of each, so reduce-scatters are even.
        edges = (buckets[:, :1] + steps[:, None] * np.arange(num_shards)).ravel()
        return _cut(np.array(self.ranges, dtype=np.int64).reshape(-1, 2), edges, num_shards)


def cut_evenly(sizes: Sequence[int], num_shards: int) -> ShardRanges:
    """Cut the concatenated parameters of ``sizes`` elements into parts that are equal to within one element."""
    stops = np.cumsum(np.array(sizes, dtype=np.int64))
    ranges = np.stack([stops - sizes, stops], axis=1) if len(sizes) else np.zeros((0, 2), dtype=np.int64)
    total = int(stops[-1]) if len(sizes) else 0
    return _cut(ranges, total * np.arange(num_shards, dtype=np.int64) // num_shards, num_shards)


def _cut(ranges: Column, edges: Column, num_shards: int) -> ShardRanges:
    """Cut ``[parameters, 2]`` at ``edges``; shards begin at the edges, cyclically."""
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

"""Maps indices to samples: a pure function of (seed, index), in constant memory.

It depends neither on the length of a run nor on its layout. Each epoch of a source is a keyed bijection of its samples
(a Feistel network over the smallest square that holds them, with cycle walking: Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002). A blend distributes every block of indices over the sources by exact cumulative
quotas and shuffles the block with another such bijection.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import ceil, isqrt, lcm

from megatron_ft.errors import ConfigError

NUM_ROUNDS = 8
MIN_BLOCK_SAMPLES = 1024
_MASK = (1 << 64) - 1


@lru_cache(maxsize=256)
def _round_keys(key: str) -> tuple[int, ...]:
    return struct.unpack(f"<{NUM_ROUNDS}Q", hashlib.blake2b(key.encode(), digest_size=8 * NUM_ROUNDS).digest())


def permute(position: int, size: int, key: str) -> int:
    """Map ``position`` by a bijection of ``range(size)`` that depends on ``key``."""
    assert 0 <= position < size, f"position {position} lies outside range({size})"
    # The square exceeds the range by about twice its root at most: few positions have to be permuted again.
    side = isqrt(size - 1) + 1 if size > 1 else 1
    keys = _round_keys(key)
    while True:
        left, right = divmod(position, side)
        for round_key in keys:
            # Added modulo the side, not combined by XOR: the side is rarely a power of two.
            left, right = right, (left + _mix(right ^ round_key)) % side
        position = left * side + right
        if position < size:
            return position


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): 64 bits to 64 well mixed bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Place:
    """Location of the sample of an index."""

    source: int
    epoch: int
    sample: int


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Order of all samples of a split.

    Within an epoch of a source each of its samples is used exactly once. At the end of every block of
    ``block_samples`` indices each source has had its share of all indices so far to within one sample.
    """

    seed: int
    split: str
    num_samples: tuple[int, ...]
    """Samples of each source, all positive."""
    weights: tuple[float | int, ...] | None = None
    """Relative weight of each source; None weighs them by their samples."""

    def __post_init__(self) -> None:
        assert self.num_samples and min(self.num_samples) > 0, f"sources without samples: {self.num_samples}"
        assert self.weights is None or len(self.weights) == len(self.num_samples), "one weight per source"

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return tuple(accumulate(_integer_weights(self.weights or self.num_samples)))

    @cached_property
    def block_samples(self) -> int:
        """Indices per block: enough that the smallest source has at least one of them."""
        smallest = min(_integer_weights(self.weights or self.num_samples))
        return max(MIN_BLOCK_SAMPLES, ceil(Fraction(self._bounds[-1], smallest)))

    def locate(self, index: int) -> Place:
        """Locate the sample at ``index``, any integer from 0."""
        if index < 0:
            raise ValueError(f"sample index {index}: must not be negative")
        source, rank = (0, index) if len(self.num_samples) == 1 else self._deal(index)
        epoch, position = divmod(rank, self.num_samples[source])
        key = f"{self.split}/{self.seed}/source {source}/epoch {epoch}"
        return Place(source, epoch, permute(position, self.num_samples[source], key))

    def _deal(self, index: int) -> tuple[int, int]:
        """Return the source and the number of its samples before this one, from the shuffled position in the block."""
        # Blocks begin at fixed indices: a sample depends neither on the length of the run nor on those before it.
        block, offset = divmod(index, self.block_samples)
        position = permute(offset, self.block_samples, f"{self.split}/{self.seed}/block {block}")
        before, total = block * self.block_samples, self._bounds[-1]
        after = before + self.block_samples
        start_before = start_after = 0
        for source, bound in enumerate(self._bounds):
            # Floors of exact cumulative shares: errors of rounding do not add up over blocks.
            end_before, end_after = bound * before // total, bound * after // total
            if position < end_after - end_before:
                return source, (end_before - start_before) + position - (start_after - start_before)
            start_before, start_after = end_before, end_after
        raise AssertionError(f"index {index} has no source")


def _integer_weights(weights: Sequence[float | int]) -> list[int]:
    fractions = [Fraction(weight) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]


def check_weights(key: str, weights: Sequence[float] | None, num_sources: int) -> None:
    """Raises ConfigError unless there is one positive finite weight per source (or none at all)."""
    if weights is None:
        return
    if len(weights) != num_sources:
        raise ConfigError.of(key, list(weights), f"must have one weight per source, {num_sources}")
    for position, weight in enumerate(weights):
        if not 0 < weight < float("inf"):
            raise ConfigError.of(f"{key}[{position}]", weight, "must be positive and finite")
    if max(weights) > 1e9 * min(weights):
        raise ConfigError.of(key, list(weights), "must lie within a factor of 1e9 of each other")

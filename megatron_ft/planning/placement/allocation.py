"""Computes the number of replicas of each expert in a layer, in proportion to its tokens and with a minimum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_ft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Numbers of replicas in one layer, and the minimum that every expert has."""

    replica_counts: tuple[int, ...]
    """Number of replicas of each expert, by expert id."""
    min_replicas: int
    """Minimum that every expert has."""
    requested_min_replicas: int
    """Minimum that was requested; larger than ``min_replicas`` if there are too few slots."""

    @property
    def lowered(self) -> bool:
        """Whether there were too few slots for the requested minimum."""
        return self.min_replicas < self.requested_min_replicas

    def validate(self) -> None:
        """Check that every expert has at least ``min_replicas`` replicas, and at least one."""
        for expert, count in enumerate(self.replica_counts):
            if count < max(1, self.min_replicas):
                raise ConfigError.of(
                    f"replica_counts[{expert}]", count, f"must be at least {max(1, self.min_replicas)}"
                )

    def summary(self) -> str:
        floor = f"at least {self.min_replicas}"
        if self.lowered:
            floor += f" (lowered from {self.requested_min_replicas}, because there are too few slots)"
        counts = self.replica_counts
        return f"{sum(counts)} replicas of {len(counts)} experts; replicas of an expert: {floor}, at most {max(counts)}"


def allocate(
    loads: Sequence[float], num_slots: int, min_replicas: int, *, num_domains: int | None = None
) -> Allocation:
    """Distribute ``num_slots`` over experts in proportion to ``loads`` (Lazarus, section 4.1, equation 1).

    In ascending order of load (ties by id), each expert gets ``floor(t_e * S / T)`` of the S remaining slots, but at
    least the minimum. T is the number of tokens of this expert and all experts after it. The division is of integers,
    so that rounding of floats has no influence. The sum of all counts is ``num_slots``. In a layer without tokens, all
    experts get about the same count. If there are too few slots, the minimum is ``num_slots // num_experts``. A count
    may exceed the number of nodes or ranks: several replicas on one rank share one set of weights.

    Args:
        loads: tokens of each expert, ``[E]``; fractions are used exactly.
        num_slots: number of slots in the whole layer.
        min_replicas: requested minimum number of replicas of each expert, at least 1.
        num_domains: number of failure domains; ``min_replicas`` must not exceed it. None means no such limit.

    Raises:
        ConfigError: a load is negative or not finite, there are more experts than slots, or the minimum is impossible.
    """
    if min_replicas < 1:
        raise ConfigError.of("min_replicas", min_replicas, "must be at least 1")
    if num_domains is not None and min_replicas > num_domains:
        raise ConfigError.of(
            "min_replicas", min_replicas, f"must be at most {num_domains}, the number of failure domains"
        )
    if not loads:
        raise ConfigError.of("num_experts", 0, "must be at least 1")
    if len(loads) > num_slots:
        raise ConfigError.of("num_experts", len(loads), f"must be at most {num_slots}, the number of slots")
    floor = min(min_replicas, num_slots // len(loads))
    tokens = integer_loads(loads)
    if not any(tokens):
        tokens = [1] * len(tokens)
    counts, slots, total = [0] * len(tokens), num_slots, sum(tokens)
    # Experts with small loads come first: slots that the minimum gives them are taken from all others in proportion.
    for expert in sorted(range(len(tokens)), key=lambda expert: (tokens[expert], expert)):
        counts[expert] = max(tokens[expert] * slots // total, floor) if total else floor
        slots -= counts[expert]
        total -= tokens[expert]
    return Allocation(replica_counts=tuple(counts), min_replicas=floor, requested_min_replicas=min_replicas)


def integer_loads(loads: Sequence[float]) -> list[int]:
    """Scale loads to integers with exactly the same proportions.

    Raises:
        ConfigError: a load is negative or not finite.
    """
    for expert, load in enumerate(loads):
        if not math.isfinite(load) or load < 0:
            raise ConfigError.of(f"loads[{expert}]", load, "must be a finite number of tokens, at least 0")
    if all(int(load) == load for load in loads):
        return [int(load) for load in loads]
    # Every float is a fraction whose denominator is a power of two, so nothing is rounded.
    exact = [Fraction(float(load)) for load in loads]
    scale = math.lcm(*(load.denominator for load in exact))
    return [int(load * scale) for load in exact]

"""Expert replicas: how many slots, where copies go, when they move (group ``placement``)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class PlacementConfig:
    """Replica slots of the mixture layers.

    Without an ``algorithm`` experts are laid out as Megatron does it: one copy each per expert group.
    """

    algorithm: dict[str, Any] | None = None
    """The placement algorithm: ``_target_`` names its class, the other entries are its fields; null for none."""
    num_slots_per_rank: int | None = None
    """Slots of each rank and layer; null takes twice an even share of the experts, rounded up."""
    min_replicas: int = 2
    """Copies every expert has at least (f), on distinct failure domains; lowered, and said so, where slots are
    short. At most the number of failure domains of a pipeline stage."""
    state_copies: int | None = None
    """Copies of each optimizer shard, on distinct failure domains; null keeps one with every computing copy."""
    rebalance_interval_iterations: int = 0
    """Plan anew from recorded loads every so many iterations; 0 never."""
    rebalance_min_gain: float = 0.05
    """Least share of the slowest rank's expert time that a new plan must save to be carried out."""
    rebalance_bytes_per_token: float = 65536.0
    """Bytes that may move for each token that the busiest ranks are spared until the next rebalance."""
    load_smoothing: float = 0.5
    """Weight of the past in the smoothed load, from 0 (newest iteration only) to below 1."""
    loads_file: str | None = None
    """Recorded loads to plan the first placement from; null plans it for even loads."""
    dispatch_backend: str = "reference"
    """``reference`` (PyTorch operators), ``cpp`` or ``cuda``."""
    schedule: list[str] = field(default_factory=list)
    """Scripted history of placements, ``ITERATION:FILE`` each: before that iteration the plan in FILE takes over.
    The reference that rebalanced runs are compared with."""

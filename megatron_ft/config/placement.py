"""Expert replicas: their slots, placement and rebalancing (group ``placement``)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class PlacementConfig:
    """Replica slots for experts. Without an ``algorithm`` each expert group has one copy of every expert."""

    algorithm: dict[str, Any] | None = None
    """Placement algorithm. ``_target_`` names its class; the other entries are its fields. null: no replicas."""
    num_slots_per_rank: int | None = None
    """Number of replica slots of each rank in each layer. null means twice the number of experts divided by the ranks
    of a pipeline stage, rounded up."""
    min_replicas: int = 2
    """Smallest number of replicas of an expert (f); they are on different failure domains. At most the number of
    failure domains of a pipeline stage. If there are too few slots, the number is lowered, with a note."""
    state_copies: int | None = None
    """Number of copies of each optimizer shard, on different failure domains. null: one with every expert replica."""
    rebalance_interval_iterations: int = 0
    """Number of iterations after which the placement is planned again from recorded loads; 0 plans only once."""
    rebalance_min_gain: float = 0.05
    """Smallest gain for which a new placement is used. The gain is the share of the busiest ranks' tokens that other
    ranks would process instead."""
    rebalance_bytes_per_token: float = 65536.0
    """Largest number of bytes moved per saved token. Saved tokens are those that the busiest ranks no longer process
    until the next rebalancing."""
    load_smoothing: float = 0.5
    """Weight of older iterations in the smoothed loads: at least 0 (only the newest iteration counts) and below 1."""
    loads_file: str | None = None
    """File of recorded loads for the first placement; null assumes equal loads."""
    dispatch_backend: str = "reference"
    """Backend that sends tokens to experts: ``reference`` (PyTorch operators), ``cpp`` or ``cuda``."""
    schedule: list[str] = field(default_factory=list)
    """Scheduled placements. An entry ``ITERATION:FILE`` uses the placement in FILE from ITERATION on. Tests compare
    rebalanced runs with runs that have such a schedule."""

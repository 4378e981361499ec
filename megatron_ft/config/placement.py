"""Expert replicas: their slots, placement and rebalancing (group ``placement``)."""

from dataclasses import dataclass, field
from typing import Any

BALANCED, EVEN = "balanced", "even"
SHARES = (BALANCED, EVEN)
"""Values of ``placement.shares``."""


@dataclass
class PlacementConfig:
    """Replica slots of mixture layers. Without an ``algorithm`` every expert group has one copy, as in Megatron."""

    algorithm: dict[str, Any] | None = None
    """Placement algorithm: ``_target_`` names its class, the other entries are its fields; null for none."""
    num_slots_per_rank: int | None = None
    """Replica slots of each rank and layer; null takes twice an even share of the experts, rounded up."""
    min_replicas: int = 2
    """Fewest replicas of an expert (f), on distinct failure domains; lowered, with a note, where there are too few
    slots. At most the number of failure domains of a pipeline stage."""
    state_copies: int | None = None
    """Copies of each optimizer shard, on distinct failure domains; null keeps one with every expert replica."""
    rebalance_interval_iterations: int = 0
    """Iterations from one planning of the placement by recorded loads to the next; 0 never plans again."""
    rebalance_min_gain: float = 0.05
    """Smallest share of the busiest ranks' tokens that a new placement must save."""
    rebalance_bytes_per_token: float = 65536.0
    """Bytes that may move per token that the busiest ranks save until the next rebalancing."""
    load_smoothing: float = 0.5
    """Weight of the past in the smoothed load, from 0 (newest iteration only) to below 1."""
    loads_file: str | None = None
    """Recorded loads for the first placement; null assumes even loads."""
    dispatch_backend: str = "auto"
    """Kernels of the token dispatch: ``cpp``, ``cuda``, ``reference`` (PyTorch operators, on any device) or ``auto``
    (``cuda`` on CUDA, ``cpp`` on CPU). All compute the same bits."""
    shares: str = BALANCED
    """Division of an expert's tokens among its replicas: ``balanced`` makes the fullest rank least, ``even`` gives
    every replica the same number (Lazarus, algorithm 1)."""
    schedule: list[str] = field(default_factory=list)
    """Scheduled placements, ``ITERATION:FILE`` each: from that iteration on the plan in FILE is used. Tests compare
    rebalanced runs with such a run."""

    def backend_on(self, device: str) -> str:
        """Resolve ``dispatch_backend`` to ``reference``, ``cpp`` or ``cuda`` for ``device``, ``cpu`` or ``cuda``."""
        if self.dispatch_backend != "auto":
            return self.dispatch_backend
        return "cuda" if device == "cuda" else "cpp"

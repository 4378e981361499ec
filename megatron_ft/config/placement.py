"""Expert replicas: their slots, placement and rebalancing (group ``placement``)."""

from dataclasses import dataclass, field
from typing import Any

BALANCED, EVEN = "balanced", "even"
SHARES = (BALANCED, EVEN)
"""Values of ``placement.shares``."""


@dataclass
class PlacementConfig:
    """Replica slots of MoE layers. Without an ``algorithm`` every expert group has one copy, as in Megatron."""

    algorithm: dict[str, Any] | None = None
    """Placement algorithm. ``_target_`` names the class; the other entries are fields of it. null for none."""
    num_slots_per_rank: int | None = None
    """Replica slots of each rank and layer. null means twice an even share of the experts, rounded up."""
    min_replicas: int = 2
    """Fewest replicas of an expert (f), on distinct failure domains. At most the number of failure domains of a
    pipeline stage. If there are too few slots, the number is lowered and a note says so."""
    state_copies: int | None = None
    """Copies of each optimizer shard, on distinct failure domains. null keeps one copy with every expert replica."""
    rebalance_interval_iterations: int = 0
    """Number of iterations between two plans of the placement from recorded loads; 0 plans only once."""
    rebalance_min_gain: float = 0.05
    """Smallest gain for which a new placement is used: the share of the busiest ranks' tokens that it saves."""
    rebalance_bytes_per_token: float = 65536.0
    """Limit of bytes moved per saved token. Saved tokens are those that the busiest ranks no longer process until the
    next rebalancing."""
    load_smoothing: float = 0.5
    """Weight of older iterations in the smoothed load, from 0 (newest iteration only) to below 1."""
    loads_file: str | None = None
    """Recorded loads for the first placement; null assumes even loads."""
    dispatch_backend: str = "auto"
    """Kernels of the token dispatch: ``cpp``, ``cuda``, ``reference`` (PyTorch operators, on any device) or ``auto``
    (``cuda`` on CUDA, ``cpp`` on CPU). All compute the same bits."""
    shares: str = BALANCED
    """Division of an expert's tokens among its replicas: ``balanced`` makes the fullest rank least, ``even`` gives
    every replica the same number (Lazarus, algorithm 1)."""
    schedule: list[str] = field(default_factory=list)
    """Scheduled placements, each ``ITERATION:FILE``: the plan in FILE is used from that iteration on. Tests compare
    rebalanced runs with such a run."""

    def backend_on(self, device: str) -> str:
        """Resolve ``dispatch_backend`` to ``reference``, ``cpp`` or ``cuda`` for ``device``, ``cpu`` or ``cuda``."""
        if self.dispatch_backend != "auto":
            return self.dispatch_backend
        return "cuda" if device == "cuda" else "cpp"

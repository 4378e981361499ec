"""Expert replicas: their slots, placement and rebalancing (group ``placement``)."""

from dataclasses import dataclass, field
from typing import Any

BALANCED, EVEN = "balanced", "even"
DEFAULT_REBALANCE_INTERVAL = 200
"""Default number of iterations between two rebalances, as in Lazarus (arXiv 2407.04656), section 6.1."""
SHARES = (BALANCED, EVEN)
"""Values of ``placement.shares``."""


@dataclass
class PlacementConfig:
    """Replica slots for experts. Without an ``algorithm``, each expert-parallel group has one copy of every expert."""

    algorithm: dict[str, Any] | None = None
    """Placement algorithm. ``_target_`` names its class; the other entries are its fields. null: no replicas."""
    num_slots_per_rank: int | None = None
    """Number of replica slots of each rank in each layer. null: just enough slots for ``placement.min_replicas``
    replicas of every expert. If the memory limit of the device is set (``limits.gpu_memory_bytes``, on CPU
    ``limits.host_memory_bytes``), further slots that fit are added, up to 1.5 times the smallest sufficient number."""
    min_replicas: int = 2
    """Smallest number of replicas of each expert (f), on different failure domains. Must not exceed the number of
    failure domains of a pipeline stage. If there are too few slots, the number is lowered, and a note is printed."""
    state_copies: int | None = None
    """Number of copies of each optimizer shard, on different failure domains. null keeps a copy with each expert
    replica. With the distributed optimizer, at least 2 are necessary to continue without a lost node, or to replace a
    lost node (``recovery.keep_layout``) without running iterations again."""
    rebalance_interval_iterations: int | None = None
    """Number of iterations after which the placement is planned again from the observed loads; 0 plans only once. null:
    200, or 0 with a ``schedule``."""
    rebalance_min_gain: float = 0.05
    """Smallest gain for which a new placement is used. The gain is the share of the busiest ranks' tokens that the new
    placement would move to other ranks."""
    rebalance_bytes_per_token: float = 65536.0
    """Largest cost for which a new placement is used: bytes of state moved per saved token. A token is saved if the
    busiest ranks no longer have to process it before the next rebalance."""
    load_smoothing: float = 0.5
    """Weight of older iterations in the smoothed expert loads, from 0 (only the newest iteration counts) to below 1."""
    loads_file: str | None = None
    """File of recorded expert loads from which the first placement is planned; null assumes equal loads."""
    dispatch_backend: str = "auto"
    """Backend that sends tokens to experts: ``reference`` (PyTorch operators, on any device), ``cpp``, ``cuda`` or
    ``auto`` (``cuda`` on CUDA, ``cpp`` on CPU). All backends compute the same bits."""
    shares: str = BALANCED
    """Division of an expert's tokens among its replicas. ``balanced``: the most loaded rank gets as few tokens as
    possible. ``even``: all replicas get the same number of tokens (Lazarus, algorithm 1)."""
    schedule: list[str] = field(default_factory=list)
    """Scheduled placements. An entry ``ITERATION:FILE`` uses the placement in FILE from ITERATION on. Tests compare
    rebalanced runs with runs that have such a schedule."""

    @property
    def rebalance_interval(self) -> int:
        """Number of iterations between two rebalances; 0 if the placement is planned only once."""
        if self.rebalance_interval_iterations is not None:
            return self.rebalance_interval_iterations
        return 0 if self.schedule else DEFAULT_REBALANCE_INTERVAL

    def backend_on(self, device: str) -> str:
        """Return the dispatch backend on ``device`` (``cpu`` or ``cuda``): ``reference``, ``cpp`` or ``cuda``."""
        if self.dispatch_backend != "auto":
            return self.dispatch_backend
        return "cuda" if device == "cuda" else "cpp"

    def kernels_on(self, device: str) -> str:
        """Return the dispatch kernels that ranks on ``device`` build: ``cpp``, ``cuda``, or an empty string if none."""
        backend = self.backend_on(device)
        return "" if self.algorithm is None or backend == "reference" else backend

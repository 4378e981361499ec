"""Snapshots of training state: policy, copies and storage (group ``snapshot``)."""

from dataclasses import dataclass
from typing import Any


@dataclass
class SnapshotConfig:
    """Capture of training state during training. Without a ``policy`` nothing is captured."""

    policy: dict[str, Any] | None = None
    """Snapshot policy. ``_target_`` names the class; the other entries are fields of it. null for none."""
    num_peer_copies: int = 2
    """Copies of every window in the memory of other failure domains (r). With 0, windows stay only on the node that
    captured them."""
    bandwidth_bytes_per_second: float | None = None
    """Bytes that one rank may capture per second. null measures the rate at start."""
    iteration_seconds: float | None = None
    """Duration of an iteration, within which a slice is captured. null measures it."""
    host_memory_limit_bytes: int | None = None
    """Limit of the host memory of one node for windows and copies for peers, checked before the start. null checks
    nothing."""
    persist_interval_windows: int = 0
    """Number of committed windows between two that are written to storage. 0 writes only on request, e.g. when the run
    is asked to stop."""
    persist_url: str | None = None
    """Path or fsspec URL for persisted windows; each run has a subfolder with the name of the run. null means
    ``windows`` in the run's folder."""
    keep_persisted: int = 2
    """Number of newest complete persisted windows to keep; 0 keeps all."""
    replan_interval_windows: int = 4
    """Number of windows between checks of the plan. A check compares the plan with measured bandwidth, iteration time
    and expert loads. 0 keeps the first plan."""
    skip_frozen_gradients: bool = True
    """Skip weight gradients of frozen operators in a replay. false is only for measuring the gain."""

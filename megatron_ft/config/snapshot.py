"""Snapshots of training state: policy, copies and storage (group ``snapshot``)."""

from dataclasses import dataclass
from typing import Any


@dataclass
class SnapshotConfig:
    """Capture of training state, copies on other nodes, and storage. Without a ``policy`` nothing is captured."""

    policy: dict[str, Any] | None = None
    """Snapshot policy. ``_target_`` names its class; the other entries are its fields. null captures nothing."""
    num_peer_copies: int = 2
    """Number of copies of every window in the memory of other failure domains (r). 0: no copies."""
    bandwidth_bytes_per_second: float | None = None
    """Bytes that one rank can capture per second. null measures the rate at the start."""
    iteration_seconds: float | None = None
    """Duration of an iteration, in which one slice is captured. null measures it."""
    host_memory_limit_bytes: int | None = None
    """Largest host memory that one node may use for windows and for copies of other nodes' windows, checked before the
    start. null checks nothing."""
    persist_interval_windows: int = 0
    """Number of commits after which a window is written to storage. 0 writes only on request, e.g. before a stop."""
    persist_url: str | None = None
    """Path or fsspec URL of the folder for windows on storage; each run has a subfolder with its name. null means
    ``windows`` in the run's folder."""
    keep_persisted: int = 2
    """Number of complete windows to keep on storage, the newest ones; 0 keeps all."""
    replan_interval_windows: int = 4
    """Number of windows after which the plan is compared with measured bandwidth, iteration time and expert loads, and
    replaced if necessary. 0 keeps the first plan."""
    skip_frozen_gradients: bool = True
    """Skip the weight gradients of frozen operators in a replay. Use false only to measure how much time this saves."""

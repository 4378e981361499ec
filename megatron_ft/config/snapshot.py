"""Snapshots of training state: policy, copies and storage (group ``snapshot``)."""

from dataclasses import dataclass
from typing import Any


@dataclass
class SnapshotConfig:
    """Capture of training state during training. Without a ``policy`` nothing is captured."""

    policy: dict[str, Any] | None = None
    """Snapshot policy: ``_target_`` names its class, the other entries are its fields; null for none."""
    num_peer_copies: int = 2
    """Copies of every window in the memory of other failure domains (r); 0 keeps windows on their own node only."""
    bandwidth_bytes_per_second: float | None = None
    """Bytes that one rank may capture per second; null measures it at start."""
    iteration_seconds: float | None = None
    """Iteration time within which a slice is captured; null measures it."""
    host_memory_limit_bytes: int | None = None
    """Largest host memory of one node for its windows and its peers' copies, checked before the start; null checks
    nothing."""
    persist_interval_windows: int = 0
    """Committed windows from one that is written to storage to the next; 0 writes on request only, e.g. on a stop
    request."""
    persist_url: str | None = None
    """Path or fsspec URL for persisted windows, where each run has a folder of its name; null takes ``windows`` in the
    run's folder."""
    keep_persisted: int = 2
    """Number of newest complete persisted windows to keep; 0 keeps all."""
    replan_interval_windows: int = 4
    """Windows after which the plan is compared with measured bandwidth, iteration time and expert loads; 0 keeps the
    first plan."""
    skip_frozen_gradients: bool = True
    """Skip weight gradients of frozen operators in a replay; false only to measure what this saves."""

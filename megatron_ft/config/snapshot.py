"""Sparse snapshots: what is captured every iteration, where copies go (group ``snapshot``)."""

from dataclasses import dataclass
from typing import Any


@dataclass
class SnapshotConfig:
    """Capture of training state while training goes on. Without a ``policy`` nothing is captured."""

    policy: dict[str, Any] | None = None
    """What is captured when: ``_target_`` names the policy's class, the other entries are its fields; null for none."""
    num_peer_copies: int = 2
    """Copies of every captured window in the memory of other failure domains (r). 0 keeps it on its own node only."""
    bandwidth_bytes_per_second: float | None = None
    """Bytes that one rank may capture per second; null measures it at start."""
    iteration_seconds: float | None = None
    """Time of an iteration that a slice must fit into; null measures it."""
    host_memory_limit_bytes: int | None = None
    """Most memory that one node may give to captured windows and peers' copies; more is refused before anything
    starts. Null checks nothing."""
    persist_interval_windows: int = 0
    """Write every so many committed windows to storage; 0 only on request (a stop request is one)."""
    persist_url: str | None = None
    """Where persisted windows go, a path or an fsspec URL: each run has a folder of its name there; null takes
    ``windows`` in the run's folder."""
    keep_persisted: int = 2
    """Newest complete persisted windows kept; 0 keeps all."""
    replan_interval_windows: int = 4
    """Look at measured bandwidth, iteration time and expert loads every so many windows; 0 never plans again."""
    skip_frozen_gradients: bool = True
    """In a replay, compute no weight gradients of frozen operators. False only to measure what it saves."""

"""Failure detection: when an unresponsive rank or node counts as lost (group ``detector``)."""

from dataclasses import dataclass


@dataclass
class DetectorConfig:
    """Timeouts for unresponsive ranks and nodes and for a job without progress. Mode ``local``."""

    heartbeat_interval_seconds: float = 1.0
    """Time between two heartbeats of a rank, and of a node's agent."""
    heartbeat_timeout_seconds: float = 10.0
    """A rank without a heartbeat for this long is killed; a node whose agent sends none for this long counts as
    lost."""
    lost_controller_seconds: float = 60.0
    """A node without an answer from the controller for this long ends its ranks: it is disconnected, and another node
    may have taken its place. Must be above ``detector.heartbeat_timeout_seconds``."""
    hang_seconds: float | None = 600.0
    """Time without progress of any rank after which the ranks furthest behind are killed; if all are at the same
    point, all of them. Null waits without limit."""

"""Failure detection: when an unresponsive rank or node counts as lost (group ``detector``)."""

from dataclasses import dataclass


@dataclass
class DetectorConfig:
    """Timeouts for unresponsive ranks and nodes and for a job without progress. Mode ``local``."""

    heartbeat_interval_seconds: float = 1.0
    """Time between two heartbeats of a rank or of a node's agent."""
    heartbeat_timeout_seconds: float = 10.0
    """Limit of the time without a heartbeat. A rank is then killed; a node whose agent sends none counts as lost."""
    lost_controller_seconds: float = 60.0
    """Limit of the time that a node gets no answer from the controller. The node then ends its ranks, because it is
    disconnected and another node may have replaced it. Must be above ``detector.heartbeat_timeout_seconds``."""
    hang_seconds: float | None = 600.0
    """Limit of the time without progress of any rank. The ranks furthest behind are then killed, or all ranks if they
    are at the same point. null waits without limit."""

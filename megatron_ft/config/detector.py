"""Failure detection: when an unresponsive rank or node counts as lost (group ``detector``)."""

from dataclasses import dataclass


@dataclass
class DetectorConfig:
    """Timeouts for unresponsive ranks and nodes and for a job without progress. Mode ``local``."""

    heartbeat_interval_seconds: float = 1.0
    """Seconds between two heartbeats of a rank or of a node's agent."""
    heartbeat_timeout_seconds: float = 10.0
    """Longest time without a heartbeat. After it, a rank is killed, and an agent's node counts as lost."""
    lost_controller_seconds: float = 60.0
    """Longest time without an answer from the controller. After it, a node ends its ranks, because the node is
    disconnected and may have been replaced. Must be above ``detector.heartbeat_timeout_seconds``."""
    hang_seconds: float | None = 600.0
    """Longest time in which no rank makes progress. After it, the ranks that are furthest behind are killed, or all
    ranks if they are equally far. null never kills ranks for this reason."""

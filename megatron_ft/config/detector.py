"""What counts as lost without having ended (group ``detector``)."""

from dataclasses import dataclass


@dataclass
class DetectorConfig:
    """How long silence and standstill are waited for. Mode ``local``."""

    heartbeat_interval_seconds: float = 1.0
    """Between two signs of life of a rank, and of a node's process."""
    heartbeat_timeout_seconds: float = 10.0
    """A rank that answers nothing for so long is killed; a node whose process gives no sign for so long is lost."""
    lost_controller_seconds: float = 60.0
    """A node that gets no answer from the controller for so long ends its ranks: they are cut off, and another may have
    taken their place. More than ``detector.heartbeat_timeout_seconds``."""
    hang_seconds: float | None = 600.0
    """When no rank of the job gets any further for so long, those that are furthest behind are killed; where all stand
    at the same place, all are. Null waits for ever."""

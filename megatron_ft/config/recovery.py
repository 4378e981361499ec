"""Recovery from failures (group ``recovery``)."""

from dataclasses import dataclass


@dataclass
class RecoveryConfig:
    """Kinds of recovery that the job may use when ranks or nodes fail, and their limits."""

    max_restarts: int = 0
    """Restarts of all ranks after one has failed, counted as long as the run makes no progress between them; ranks
    continue from the newest window or checkpoint. Mode ``local``."""
    min_nodes: int | None = None
    """Fewest nodes that training continues with after losses: a node is removed when one of its ranks dies, and the
    other nodes continue in their processes. Null needs all nodes."""
    keep_layout: bool = False
    """Whether the job keeps its parallel layout when nodes are lost: a spare node, or the restarted node itself, takes
    the place of the lost one, and only the pipeline stages that lost a rank go back."""
    position_timeout_seconds: float = 10.0
    """Longest wait, when nodes are lost, for a rank's position after others have reported theirs; its node is then lost
    too. This is a last resort: a rank aborts a collective by itself after half a second. Must exceed the time that a
    rank computes between two collectives."""
    reconfigure_timeout_seconds: float = 60.0
    """Longest wait, when nodes are lost, for the positions of the remaining ranks and for their new process group."""

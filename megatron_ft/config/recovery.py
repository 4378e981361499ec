"""Recovery from failures (group ``recovery``)."""

from dataclasses import dataclass


@dataclass
class RecoveryConfig:
    """Kinds of recovery that the job may use when ranks or nodes fail, and their limits."""

    max_restarts: int = 0
    """Limit of restarts of all ranks after a rank has failed. Progress sets the count back to 0. Ranks continue from
    the newest window or checkpoint. Mode ``local``."""
    min_nodes: int | None = None
    """Fewest nodes with which training continues after losses. When a rank dies, its node is removed and the other
    nodes continue in their processes. null needs all nodes."""
    keep_layout: bool = False
    """Whether the job keeps the parallel layout when nodes are lost. A spare node, or the restarted node itself,
    replaces the lost one. Only the pipeline stages that lost a rank replay."""
    position_timeout_seconds: float = 10.0
    """Limit of the time to wait for the position of a rank after others have reported theirs, when nodes are lost.
    After it, the node of that rank is also lost. This is a last resort: a rank aborts a collective by itself after half
    a second. Must exceed the time that a rank computes between two collectives."""
    reconfigure_timeout_seconds: float = 60.0
    """Limit of the time to wait, when nodes are lost, for the positions of the remaining ranks and for the new process
    group."""

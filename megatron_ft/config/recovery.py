"""Recovery from failures (group ``recovery``)."""

from dataclasses import dataclass


@dataclass
class RecoveryConfig:
    """Kinds of recovery that the job may use when ranks or nodes fail, and limits for them."""

    max_restarts: int = 0
    """Largest number of times that all ranks are restarted after a rank has failed. Progress resets the count to 0. The
    ranks continue from the newest window or checkpoint. Only in mode ``local``."""
    min_nodes: int | None = None
    """Smallest number of nodes with which training continues after nodes are lost. When a rank dies, its node is
    removed, and ranks on the other nodes continue without a restart. null: the job needs all nodes."""
    keep_layout: bool = False
    """Whether the job keeps its parallel layout when nodes are lost. A spare node, or the lost node after a restart,
    replaces the lost one, and only pipeline stages that lost a rank replay."""
    position_timeout_seconds: float = 10.0
    """Longest time to wait for the position (newest iteration) of a rank after another rank has reported its own, when
    nodes are lost. After it, the node of that rank also counts as lost. Usually a rank reports earlier, because it
    aborts a collective after half a second. Must exceed the time that a rank computes between two collectives."""
    reconfigure_timeout_seconds: float = 60.0
    """Longest time to wait for positions of all remaining ranks and for the new process group after a loss."""

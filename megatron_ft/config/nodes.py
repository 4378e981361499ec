"""Spare, joining and restarted nodes (group ``nodes``)."""

from dataclasses import dataclass


@dataclass
class NodesConfig:
    """Nodes besides those that the job starts with: spares, nodes that join, and lost nodes that are restarted."""

    max_nodes: int | None = None
    """Largest number of nodes, spares included; nodes are numbered from 0, and those beyond ``launch.num_nodes`` join
    while the job runs. Null: ``launch.num_nodes`` and the spares."""
    num_spare_nodes: int = 0
    """Nodes beyond ``launch.num_nodes`` that are started and wait; each replaces a node that is lost or leaves."""
    join_window_seconds: float = 5.0
    """Wait after a node is ready to join, so that other nodes can join at the same time."""
    max_node_restarts: int = 3
    """Restarts of a lost node in a row, each of which fails to start or trains for fewer than ten iterations."""
    restart_lost_nodes: bool = False
    """Whether a lost node is started again to join the others. With ``launch.node_launcher=none`` its agent is not
    started but waited for."""

"""Spare, joining and restarted nodes (group ``nodes``)."""

from dataclasses import dataclass


@dataclass
class NodesConfig:
    """Nodes besides those that the job starts with: spares, nodes that join, and lost nodes that are restarted."""

    max_nodes: int | None = None
    """Largest number of nodes, including spares. Nodes are numbered from 0; those from ``launch.num_nodes`` on join
    while the job runs. null means ``launch.num_nodes`` plus the spares."""
    num_spare_nodes: int = 0
    """Number of nodes in addition to ``launch.num_nodes`` that are started and wait. Each replaces a node that is lost
    or leaves."""
    join_window_seconds: float = 5.0
    """Time to wait after a node is ready to join, so that other nodes can join at the same time."""
    max_node_restarts: int = 3
    """Limit of failed restarts of a lost node in a row. A restart fails if the node does not start or ends before ten
    iterations."""
    restart_lost_nodes: bool = False
    """Whether a lost node is started again and joins the others. With ``launch.node_launcher=none`` the job waits for
    the node instead."""

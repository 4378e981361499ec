"""Spare, joining and restarted nodes (group ``nodes``)."""

from dataclasses import dataclass


@dataclass
class NodesConfig:
    """Nodes besides those with which the job starts: spares, nodes that join, and lost nodes that are restarted."""

    max_nodes: int | None = None
    """Largest number of nodes, including spares. Nodes with numbers from ``launch.num_nodes`` up can join while the job
    runs. null means ``launch.num_nodes`` plus ``nodes.num_spare_nodes``."""
    num_spare_nodes: int = 0
    """Number of nodes started in addition to ``launch.num_nodes``. A spare waits until it replaces a lost node."""
    join_window_seconds: float = 5.0
    """Time that the job waits after a node is ready to join, so that other nodes can join with it."""
    max_node_restarts: int = 3
    """Largest number of failed restarts of a lost node in a row. A restart fails if the node does not start, or ends
    within ten iterations."""
    restart_lost_nodes: bool = False
    """Whether a lost node is started again and joins the job. With ``launch.node_launcher=none`` the job waits for the
    node instead of starting it."""

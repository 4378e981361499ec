"""Failure domains of the nodes (group ``topology``)."""

from dataclasses import dataclass, field


@dataclass
class TopologyConfig:
    """Failure domains of the nodes: which of them are lost together."""

    failure_domains: list[str] = field(default_factory=list)
    """Name of each node's failure domain (rack, switch). If empty, every node is its own domain."""
    failure_domain_source: str = "listed"
    """Source of the names of failure domains. ``listed``: ``topology.failure_domains``. ``slurm_topology``: the
    topology of the Slurm cluster at start; the domain of a node is its leaf switch. Needs
    ``launch.node_launcher=srun``."""

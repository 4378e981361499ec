"""Nodes and ranks (group ``launch``)."""

from dataclasses import dataclass, field


@dataclass
class LaunchConfig:
    """Who starts the ranks, and how many there are."""

    mode: str = "local"
    """``local``: this command starts node processes, they start ranks. ``torchrun`` or ``srun``: this
    process already is a rank (the groups of the same name; chosen by itself where their variables
    are set, and said so)."""
    num_nodes: int = 1
    """Nodes of the job."""
    ranks_per_node: int = 1
    """Ranks (processes) per node; one per GPU on CUDA."""
    interface: str = "127.0.0.1"
    """Address the job's control channel binds to. Never all interfaces."""
    master_port: int = 0
    """Port of the rendezvous store; 0 takes a free one."""
    forkserver_socket: str | None = None
    """Unix socket of a warm fork server to start ranks from; null starts one for the job."""
    start_timeout_seconds: float = 300.0
    """Longest wait for all ranks to report."""
    stop_timeout_seconds: float = 20.0
    """After a stop request, ranks that still live so long are killed."""
    max_restarts: int = 0
    """Times in a row that all ranks are started again after one has failed, without the run getting further than
    before; they continue from the newest window or checkpoint. Mode ``local`` only."""
    min_nodes: int | None = None
    """Fewest nodes that training goes on with when nodes are lost: a node one of whose ranks dies is left behind and
    the others go on in their processes. Null needs all of them."""
    reform_timeout_seconds: float = 60.0
    """Longest wait, when nodes are lost, for the other ranks to say how far they are, and to join each other again."""
    membership_schedule: list[str] = field(default_factory=list)
    """Scripted losses, e.g. ``lose(nodes=[2],before_iteration=5)``: at that boundary the ranks of these nodes end
    well and the others go on. The reference that runs with lost nodes are compared with."""
    failure_domains: list[str] = field(default_factory=list)
    """Name of each node's failure domain (rack, switch); empty makes every node its own."""
    failpoints: list[str] = field(default_factory=list)
    """Faults to inject, e.g. ``kill(rank=1,at_iteration=7,phase="backward")``."""
    gpu_memory_bytes: int | None = None
    """Memory of one GPU for ``dry_run`` to check against; null checks nothing."""
    host_memory_bytes: int | None = None
    """Memory of one node for ``dry_run`` to check against; null reads this machine's in ``local`` mode."""

    @property
    def fewest_nodes(self) -> int:
        """Nodes the job goes on with, at least."""
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def may_lose_nodes(self) -> bool:
        """Whether the job goes on without nodes that it loses."""
        return self.fewest_nodes < self.num_nodes

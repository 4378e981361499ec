"""Nodes and ranks (group ``launch``)."""

from dataclasses import dataclass, field


@dataclass
class LaunchConfig:
    """Processes of the job: who starts them, how many there are, and how the job reacts when nodes are lost or join."""

    mode: str = "local"
    """``local``: this command starts an agent per node, and agents start the ranks. ``torchrun`` or ``srun``: this
    process is already a rank. If the launcher's variables are set, the mode is chosen automatically, with a note."""
    node_launcher: str = "local"
    """Starter of the nodes in mode ``local``. ``local``: this command, on this machine. ``srun``: this command, on each
    node of the Slurm allocation in which it runs. ``none``: Slurm. Each task of the job array is then a node that
    connects to this command and connects again after it was lost. ``module:Class``: a launcher outside of this package
    (``control/launchers/base.py``)."""
    num_nodes: int = 1
    """Nodes that the job starts with."""
    ranks_per_node: int = 1
    """Ranks (processes) per node."""
    ranks_per_gpu: int = 1
    """Ranks of one machine that share a GPU, for tests on machines with few GPUs. Above 1, every rank gets another NCCL
    host id, and NCCL uses only sockets."""
    interface: str = "127.0.0.1"
    """Address that the control channel binds to; never all interfaces. With ``launch.node_launcher=srun`` and ``none``
    it may be the name of a network interface of the batch host. Mode ``local``."""
    tls_dir: str | None = None
    """Folder with ``ca.pem``, ``cert.pem`` and ``key.pem``. The control channel is then encrypted, and both sides
    present a certificate of that authority. null sends plain text. Mode ``local``."""
    master_port: int = 0
    """Port of the rendezvous store; 0 takes a free one. Modes ``local`` and ``srun``."""
    forkserver_socket: str | None = None
    """Unix socket of a running fork server to start ranks from; null starts one for the job. Mode ``local``."""
    start_timeout_seconds: float = 300.0
    """Limit of the time until all ranks report that they have started."""
    stop_timeout_seconds: float = 20.0
    """Time after a stop request after which running ranks are killed. Mode ``local``."""
    max_restarts: int = 0
    """Limit of restarts of all ranks after a rank has failed. Progress sets the count back to 0. Ranks continue from
    the newest window or checkpoint. Mode ``local``."""
    min_nodes: int | None = None
    """Fewest nodes with which training continues after losses. When a rank dies, its node is removed and the other
    nodes continue in their processes. null needs all nodes."""
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
    keep_layout: bool = False
    """Whether the job keeps the parallel layout when nodes are lost. A spare node, or the restarted node itself,
    replaces the lost one. Only the pipeline stages that lost a rank replay."""
    position_timeout_seconds: float = 10.0
    """Limit of the time to wait for the position of a rank after others have reported theirs, when nodes are lost.
    After it, the node of that rank is also lost. This is a last resort: a rank aborts a collective by itself after half
    a second. Must exceed the time that a rank computes between two collectives."""
    reform_timeout_seconds: float = 60.0
    """Limit of the time to wait, when nodes are lost, for the positions of the remaining ranks and for the new process
    group."""
    membership_schedule: list[str] = field(default_factory=list)
    """Scheduled membership changes, e.g. ``lose(nodes=[2],before_iteration=5)``, ``join(nodes=[2],before_iteration=9)``
    or both in ``change(lose=[1],join=[2],before_iteration=12)``. The ranks of these nodes leave or join before that
    iteration. A node in both lists is restarted. Tests compare runs that lost nodes with such a run. The event
    ``membership_changed`` contains the entries that repeat a run (docs/elastic.md)."""
    failure_domains: list[str] = field(default_factory=list)
    """Name of each node's failure domain (rack, switch). If empty, every node is its own domain."""
    failure_domain_source: str = "listed"
    """Source of the names of failure domains. ``listed``: ``launch.failure_domains``. ``slurm_topology``: the topology
    of the Slurm cluster at start; the domain of a node is its leaf switch. Needs ``launch.node_launcher=srun``."""
    failpoints: list[str] = field(default_factory=list)
    """Faults to inject, e.g. ``kill(rank=1,at_iteration=7,phase="backward")``."""
    gpu_memory_bytes: int | None = None
    """Memory of one GPU, as a limit of the plan. null: a start on CUDA asks ``nvidia-smi``. A dry run with null notes
    that GPU memory is not checked."""
    host_memory_bytes: int | None = None
    """Memory of one node, as a limit of the plan. null means the memory of this machine in mode ``local``."""

    @property
    def fewest_nodes(self) -> int:
        """Return the smallest number of nodes with which the job continues."""
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def most_nodes(self) -> int:
        """Return the largest number of nodes, including spares. Node numbers are below it."""
        return self.num_nodes + self.num_spare_nodes if self.max_nodes is None else self.max_nodes

    @property
    def most_members(self) -> int:
        """Return the largest number of nodes that train at the same time."""
        return self.most_nodes - self.num_spare_nodes

    @property
    def member_domains(self) -> list[str]:
        """Return the failure domain of each node that the job starts with; ``failure_domains`` also names those of
        spares."""
        return self.failure_domains[: self.num_nodes] or [f"node{node}" for node in range(self.num_nodes)]

    @property
    def may_lose_nodes(self) -> bool:
        """Return whether the job continues in its processes when nodes are lost, leave or join."""
        return self.keep_layout or self.fewest_nodes < self.most_nodes

    @property
    def why_nodes_change(self) -> str | None:
        """Return the key that makes ``may_lose_nodes`` true, e.g. ``launch.min_nodes=1``; None if it is false."""
        if not self.may_lose_nodes:
            return None
        if self.keep_layout:
            return "launch.keep_layout=true"
        if self.fewest_nodes < self.num_nodes:
            return f"launch.min_nodes={self.min_nodes}"
        if self.max_nodes is not None:
            return f"launch.max_nodes={self.max_nodes}"
        return f"launch.num_spare_nodes={self.num_spare_nodes}"

"""Nodes and ranks (group ``launch``)."""

from dataclasses import dataclass, field


@dataclass
class LaunchConfig:
    """Processes of the job: who starts them, how many, and what happens when nodes are lost or join."""

    mode: str = "local"
    """``local``: this command starts an agent per node, and agents start the ranks. ``torchrun`` or ``srun``: this
    process is already a rank; chosen automatically, with a note, where the launcher's variables are set."""
    node_launcher: str = "local"
    """Start of nodes in mode ``local``. ``local``: on this machine. ``srun``: one on each node of the Slurm
    allocation that this command runs in. ``none``: not by this command; each task of the Slurm array that it runs in
    connects as a node, and reconnects by itself if it is lost. ``module:Class`` is a launcher from outside of this
    package (``control/launchers/base.py``)."""
    num_nodes: int = 1
    """Nodes that the job starts with."""
    ranks_per_node: int = 1
    """Ranks (processes) per node."""
    ranks_per_gpu: int = 1
    """Ranks of one machine that share a GPU, for tests on machines with few GPUs. Above 1 every rank gets its own NCCL
    host id, and NCCL uses sockets only."""
    interface: str = "127.0.0.1"
    """Address that the control channel binds to; never all interfaces. With ``launch.node_launcher=srun`` and ``none``
    it may be the name of a network interface of the batch host. Mode ``local``."""
    tls_dir: str | None = None
    """Folder with ``ca.pem``, ``cert.pem`` and ``key.pem``. The control channel is then encrypted, and both sides
    present a certificate of that authority. Null sends plain text. Mode ``local``."""
    master_port: int = 0
    """Port of the rendezvous store; 0 takes a free one. Modes ``local`` and ``srun``."""
    forkserver_socket: str | None = None
    """Unix socket of a running fork server to start ranks from; null starts one for the job. Mode ``local``."""
    start_timeout_seconds: float = 300.0
    """Longest wait for all ranks to report that they have started."""
    stop_timeout_seconds: float = 20.0
    """Time after a stop request at which ranks that still run are killed. Mode ``local``."""
    max_restarts: int = 0
    """Restarts of all ranks after one has failed, counted as long as the run makes no progress between them; ranks
    continue from the newest window or checkpoint. Mode ``local``."""
    min_nodes: int | None = None
    """Fewest nodes that training continues with after losses: a node is removed when one of its ranks dies, and the
    other nodes continue in their processes. Null needs all nodes."""
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
    keep_layout: bool = False
    """Whether the job keeps its parallel layout when nodes are lost: a spare node, or the restarted node itself, takes
    the place of the lost one, and only the pipeline stages that lost a rank go back."""
    position_timeout_seconds: float = 10.0
    """Longest wait, when nodes are lost, for a rank's position after others have reported theirs; its node is then lost
    too. This is a last resort: a rank aborts a collective by itself after half a second. Must exceed the time that a
    rank computes between two collectives."""
    reform_timeout_seconds: float = 60.0
    """Longest wait, when nodes are lost, for the positions of the remaining ranks and for their new process group."""
    membership_schedule: list[str] = field(default_factory=list)
    """Scheduled membership changes, e.g. ``lose(nodes=[2],before_iteration=5)``, ``join(nodes=[2],before_iteration=9)``
    or both in ``change(lose=[1],join=[2],before_iteration=12)``. Before that iteration the ranks of these nodes leave
    or join; a node in both lists is restarted. Tests compare runs that lost nodes with such a run; the event
    ``membership_changed`` holds the entries that repeat a run (docs/elastic.md)."""
    failure_domains: list[str] = field(default_factory=list)
    """Name of each node's failure domain (rack, switch); if empty, every node is a domain of its own."""
    failure_domain_source: str = "listed"
    """Source of the names of failure domains. ``listed``: ``launch.failure_domains``. ``slurm_topology``: the topology
    of the Slurm cluster at start; a node's domain is its leaf switch. Needs ``launch.node_launcher=srun``."""
    failpoints: list[str] = field(default_factory=list)
    """Faults to inject, e.g. ``kill(rank=1,at_iteration=7,phase="backward")``."""
    gpu_memory_bytes: int | None = None
    """Memory of one GPU, as a limit of the plan. Null: a start on CUDA asks ``nvidia-smi``, and a dry run notes that
    GPU memory is not checked."""
    host_memory_bytes: int | None = None
    """Memory of one node, as a limit of the plan; null takes this machine's in mode ``local``."""

    @property
    def fewest_nodes(self) -> int:
        """Smallest number of nodes that the job continues with."""
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def most_nodes(self) -> int:
        """Largest number of nodes, spares included; node numbers are below it."""
        return self.num_nodes + self.num_spare_nodes if self.max_nodes is None else self.max_nodes

    @property
    def most_members(self) -> int:
        """Largest number of nodes that train at the same time."""
        return self.most_nodes - self.num_spare_nodes

    @property
    def member_domains(self) -> list[str]:
        """Failure domain of each node that the job starts with; ``failure_domains`` also names those of spares."""
        return self.failure_domains[: self.num_nodes] or [f"node{node}" for node in range(self.num_nodes)]

    @property
    def may_lose_nodes(self) -> bool:
        """Whether the job continues in its processes when nodes are lost, leave or join."""
        return self.keep_layout or self.fewest_nodes < self.most_nodes

    @property
    def why_nodes_change(self) -> str | None:
        """The key that makes ``may_lose_nodes`` true, e.g. ``launch.min_nodes=1``; None if it is false."""
        if not self.may_lose_nodes:
            return None
        if self.keep_layout:
            return "launch.keep_layout=true"
        if self.fewest_nodes < self.num_nodes:
            return f"launch.min_nodes={self.min_nodes}"
        if self.max_nodes is not None:
            return f"launch.max_nodes={self.max_nodes}"
        return f"launch.num_spare_nodes={self.num_spare_nodes}"

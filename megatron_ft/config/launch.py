"""Nodes and ranks (group ``launch``)."""

from dataclasses import dataclass, field


@dataclass
class LaunchConfig:
    """Who starts the ranks, and how many there are."""

    mode: str = "local"
    """``local``: this command starts node processes, they start ranks. ``torchrun`` or ``srun``: this
    process already is a rank (the groups of the same name; chosen by itself where their variables
    are set, and said so)."""
    node_launcher: str = "local"
    """Where this command starts the nodes of a job of mode ``local``. ``local``: on this machine. ``srun``: one on each
    node of the Slurm allocation that it runs in. ``none``: nowhere; nodes come by themselves, the tasks of the Slurm
    array that it runs in, and come back by themselves or not at all. ``module:Class`` is a launcher from
    outside of this package (``control/launchers/base.py``)."""
    num_nodes: int = 1
    """Nodes the job starts with."""
    ranks_per_node: int = 1
    """Ranks (processes) per node."""
    ranks_per_gpu: int = 1
    """Ranks of one machine that share a GPU, for trials on machines with few GPUs. More than 1 gives each rank a host
    id of its own for NCCL, which then uses sockets only."""
    interface: str = "127.0.0.1"
    """Address the job's control channel binds to. Never all interfaces. With ``launch.node_launcher=srun`` and ``none``
    it may be the name of a network interface of the batch host. Mode ``local``."""
    tls_dir: str | None = None
    """Folder with ``ca.pem``, ``cert.pem`` and ``key.pem``: the control channel is encrypted, and both sides show a
    certificate of that authority. Null sends in clear. Mode ``local``."""
    master_port: int = 0
    """Port of the rendezvous store; 0 takes a free one. Modes ``local`` and ``srun``."""
    forkserver_socket: str | None = None
    """Unix socket of a warm fork server to start ranks from; null starts one for the job. Mode ``local``."""
    start_timeout_seconds: float = 300.0
    """Longest wait for all ranks to report."""
    stop_timeout_seconds: float = 20.0
    """After a stop request, ranks that still live so long are killed. Mode ``local``."""
    max_restarts: int = 0
    """Times in a row that all ranks are started again after one has failed, without the run getting further than
    before; they continue from the newest window or checkpoint. Mode ``local`` only."""
    min_nodes: int | None = None
    """Fewest nodes that training goes on with when nodes are lost: a node one of whose ranks dies is left behind and
    the others go on in their processes. Null needs all of them."""
    max_nodes: int | None = None
    """Nodes that there can be, spares included, numbered from 0; those beyond ``launch.num_nodes`` join while the job
    runs. Null: ``launch.num_nodes`` and the spares."""
    num_spare_nodes: int = 0
    """Nodes beyond ``launch.num_nodes`` that are started, too, and wait: each takes the place of a node that is lost or
    leaves."""
    join_window_seconds: float = 5.0
    """From the first node that is ready to join until ranks are told to let it in, so that others may join with it."""
    max_node_restarts: int = 3
    """Times in a row that a lost node is started again without having trained for ten iterations, whether it joined
    or its start failed."""
    restart_lost_nodes: bool = False
    """Whether a lost node is started again, to join the others. With ``launch.node_launcher=none`` its process is not
    started but awaited."""
    keep_layout: bool = False
    """Whether the job keeps its parallel layout when nodes are lost: other processes take their places, a spare that
    is ready or the node's own ranks started again, and only the pipeline stages that lost a rank go back."""
    position_timeout_seconds: float = 10.0
    """Longest wait, when nodes are lost, for a rank to report how far it is while others have. Its node is lost then,
    too: the last resort, for a rank abandons a collective by itself after half a second. Must be more than a rank
    computes between two collectives."""
    reform_timeout_seconds: float = 60.0
    """Longest wait, when nodes are lost, for the other ranks to say how far they are, and to join each other again."""
    membership_schedule: list[str] = field(default_factory=list)
    """Scripted history, e.g. ``lose(nodes=[2],before_iteration=5)`` and ``join(nodes=[2],before_iteration=9)``, or both
    in ``change(lose=[1],join=[2],before_iteration=12)``: at that boundary the ranks of these nodes leave well, or join
    with what the others give them. A node in both lists has new ranks. ``membership_changed`` names the entries that
    repeat a run (docs/elastic.md). The reference that runs with lost and joining nodes are compared with."""
    failure_domains: list[str] = field(default_factory=list)
    """Name of each node's failure domain (rack, switch); empty makes every node its own."""
    failure_domain_source: str = "listed"
    """Where the names of ``launch.failure_domains`` come from. ``listed``: from that key. ``slurm_topology``: at start,
    from the topology of the Slurm cluster, a node's domain being the leaf switch it hangs on. Needs
    ``launch.node_launcher=srun``."""
    failpoints: list[str] = field(default_factory=list)
    """Faults to inject, e.g. ``kill(rank=1,at_iteration=7,phase="backward")``."""
    gpu_memory_bytes: int | None = None
    """Memory of one GPU, which the plan is checked against. Null: a start on CUDA asks ``nvidia-smi``, and a dry run
    says that GPU memory is not checked."""
    host_memory_bytes: int | None = None
    """Memory of one node for ``dry_run`` to check against; null reads this machine's in ``local`` mode."""

    @property
    def fewest_nodes(self) -> int:
        """Nodes the job goes on with, at least."""
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def most_nodes(self) -> int:
        """Nodes that there can be, spares included: they are numbered from 0 to below it."""
        return self.num_nodes + self.num_spare_nodes if self.max_nodes is None else self.max_nodes

    @property
    def most_members(self) -> int:
        """Nodes that train at the same time, at most."""
        return self.most_nodes - self.num_spare_nodes

    @property
    def member_domains(self) -> list[str]:
        """Failure domain of each node the job starts with; ``failure_domains`` goes on with those of spares."""
        return self.failure_domains[: self.num_nodes] or [f"node{node}" for node in range(self.num_nodes)]

    @property
    def may_lose_nodes(self) -> bool:
        """Whether nodes are lost, leave and join while the processes of the others live."""
        return self.keep_layout or self.fewest_nodes < self.most_nodes

    @property
    def why_nodes_change(self) -> str | None:
        """The key by which ``may_lose_nodes`` holds, as in ``launch.min_nodes=1``; None where it does not hold."""
        if not self.may_lose_nodes:
            return None
        if self.keep_layout:
            return "launch.keep_layout=true"
        if self.fewest_nodes < self.num_nodes:
            return f"launch.min_nodes={self.min_nodes}"
        if self.max_nodes is not None:
            return f"launch.max_nodes={self.max_nodes}"
        return f"launch.num_spare_nodes={self.num_spare_nodes}"

"""Nodes and ranks (group ``launch``)."""

from dataclasses import dataclass


@dataclass
class LaunchConfig:
    """Processes of the job: who starts them, how many, and how long a start and a stop may take."""

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
    master_port: int = 0
    """Port of the rendezvous store; 0 takes a free one. Modes ``local`` and ``srun``."""
    forkserver_socket: str | None = None
    """Unix socket of a running fork server to start ranks from; null starts one for the job. Mode ``local``."""
    start_timeout_seconds: float = 300.0
    """Longest wait for all ranks to report that they have started."""
    stop_timeout_seconds: float = 20.0
    """Time after a stop request at which ranks that still run are killed. Mode ``local``."""

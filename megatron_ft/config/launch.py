"""Nodes and ranks (group ``launch``)."""

from dataclasses import dataclass


@dataclass
class LaunchConfig:
    """Processes of the job: who starts them, how many there are, and how long a start and a stop may take."""

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
    master_port: int = 0
    """Port of the rendezvous store; 0 takes a free one. Modes ``local`` and ``srun``."""
    forkserver_socket: str | None = None
    """Unix socket of a running fork server to start ranks from; null starts one for the job. Mode ``local``."""
    start_timeout_seconds: float = 300.0
    """Limit of the time until all ranks report that they have started."""
    stop_timeout_seconds: float = 20.0
    """Time after a stop request after which running ranks are killed. Mode ``local``."""

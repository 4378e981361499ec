"""Nodes and ranks (group ``launch``)."""

from dataclasses import dataclass


@dataclass
class LaunchConfig:
    """Launchers and numbers of nodes and ranks, and time limits for start and stop."""

    mode: str = "local"
    """Launcher of the ranks. ``local``: this command starts an agent for each node, and agents start the ranks.
    ``torchrun`` or ``srun``: that launcher has started this process as a rank. The mode is chosen automatically, with a
    note, if the environment variables of such a launcher are set."""
    node_launcher: str = "local"
    """Launcher of the nodes in mode ``local``. ``local``: this command starts them on this machine. ``srun``: this
    command starts one on each node of its Slurm allocation. ``none``: Slurm starts them as tasks of a job array, and
    each task connects to this command, also when Slurm has restarted it. ``module:Class``: a launcher of another
    package (``control/launchers/base.py``)."""
    num_nodes: int = 1
    """Number of nodes with which the job starts."""
    ranks_per_node: int = 1
    """Number of ranks (processes) per node."""
    ranks_per_gpu: int = 1
    """Number of ranks of one machine that share a GPU, for tests on machines with few GPUs. Above 1, every rank gets
    its own NCCL host id, and NCCL uses only sockets."""
    master_port: int = 0
    """Port of the rendezvous store; 0 chooses a free port. Only in modes ``local`` and ``srun``."""
    forkserver_socket: str | None = None
    """Unix socket of a running fork server that starts the ranks; null starts a new one. Only in mode ``local``."""
    start_timeout_seconds: float = 300.0
    """Longest time until all ranks report that they have started."""
    stop_timeout_seconds: float = 20.0
    """Time between a request to stop and the kill of ranks that still run. Only in mode ``local``."""

"""Nodes of a Slurm allocation: each node's host, and the command that starts the node's process.

Source: the manual page srun(1). Measured with Slurm 22.05: a step whose node dies can end with exit code 0, so exit
codes of ``srun`` are not used here. SIGTERM to ``srun`` ends the task of ``srun``; SIGKILL to ``srun`` does not.
"""

import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.control.launchers.torchrun import expand_nodelist
from megatron_ft.control.slurm.attempts import FOLDER
from megatron_ft.errors import ConfigError

_KEY = "launch.node_launcher"
TERM_SECONDS = 10.0
"""Time that ``srun`` has to end its task. After this time, ``srun`` is killed."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes of a Slurm job. Node ``k`` of this project is the host at position ``k`` of Slurm's list of hosts."""

    job_id: str
    hosts: tuple[str, ...]

    def srun(self, node: int) -> list[str]:
        """Return the ``srun`` command that runs a program on a node, as a job step that can run beside other steps.

        The options are explicit, because the environment or the site's configuration could set other defaults.
        """
        return [
            "srun",
            f"--jobid={self.job_id}",
            f"--nodelist={self.hosts[node]}",
            "--nodes=1",
            "--ntasks=1",
            "--ntasks-per-node=1",
            # The job's own ``--no-kill`` does not apply to its steps.
            "--no-kill",
            # A site can change the default with ``KillOnBadExit``.
            "--kill-on-bad-exit=0",
            # Without ``--overlap``, the step of a node that is started again waits for the CPUs of the old step.
            "--overlap",
            # One task has the whole node: the ranks are its descendants.
            "--cpu-bind=none",
            "--mem=0",
            "--mpi=none",
            "--export=ALL",
            f"--job-name=node-{node:03d}",
        ]

    def keep_script(self, run_dir: Path, script: str | None) -> None:
        """Store a copy of the batch script as ``slurm/JOB.sbatch`` in the run's folder.

        Args:
            script: path of the batch script; None stores nothing.
        """
        if script is not None:
            folder = run_dir / FOLDER
            folder.mkdir(exist_ok=True)
            shutil.copyfile(script, folder / f"{self.job_id}.sbatch")

    @classmethod
    def read(cls, variables: Mapping[str, str], *, most_nodes: int) -> "Allocation":
        """Read the allocation of this process.

        Args:
            most_nodes: largest number of nodes of the job, spares included.

        Raises:
            ConfigError: this process is in no allocation, or the allocation is too small.
        """
        job, nodes = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_JOB_NODELIST", "")
        if not job or not nodes:
            raise ConfigError.of(
                _KEY, "srun", "needs a Slurm allocation: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set"
            )
        hosts = tuple(expand_nodelist("SLURM_JOB_NODELIST", nodes))
        if len(hosts) < most_nodes:
            constraint = f"needs {most_nodes} nodes, spares included, but job {job} has {len(hosts)}: {nodes}"
            raise ConfigError.of(_KEY, "srun", constraint)
        return cls(job, hosts)


def address_of(interface: str) -> str:
    """Return the address for ``control.interface``. The value ``interface`` is the name of a network interface, or an
    address, which is returned unchanged.

    Raises:
        ConfigError: the interface has no address, or other machines cannot reach it.
    """
    import psutil

    found = psutil.net_if_addrs().get(interface)
    address = interface
    if found is not None:
        # IPv4 is preferred. Gloo and NCCL receive the name of the interface and choose the address themselves.
        ours = [entry for family in (socket.AF_INET, socket.AF_INET6) for entry in found if entry.family == family]
        if not ours:
            raise ConfigError.of("control.interface", interface, "must have an IPv4 or IPv6 address, but has none")
        address = ours[0].address.partition("%")[0]
    if address == "localhost" or address.startswith("127.") or address.strip("[]") == "::1":
        constraint = "must be an address that other nodes can reach, or an interface with such an address, because "
        raise ConfigError.of("control.interface", interface, f"{constraint}{_KEY} is srun or none")
    return address


def own_address(controller_address: str) -> str:
    """Return the address of this machine on the route to the controller.

    Args:
        controller_address: ``host:port``, with brackets around IPv6.
    """
    host, _, port = controller_address.rpartition(":")
    family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)  # a datagram socket only chooses the route and sends nothing
        return str(probe.getsockname()[0])

"""Runs a real Slurm cluster on this machine: one slurmctld, and for each node a slurmd in its own Linux namespaces.

A node has its own process ids, host name, network and mounts, and shares the machine's files. Killing its first process
ends all its processes, as a loss of power does. This module needs root, Linux namespaces, and Debian's packages
``slurmctld slurmd slurm-client munge``.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "squeue", "scancel", "unshare", "ip")
START_SECONDS = 30.0
DOWN_SECONDS = 60.0
"""Seconds after which Slurm has marked a dead node as down, even on a loaded machine."""
_PAUSE_SECONDS = 0.05
_DAEMON_FOLDERS = "/usr/sbin:/sbin"

_CONF = """\
ClusterName=test{port}
SlurmctldHost={host}({net}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={slurmd_port}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd.%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
InactiveLimit=0
KillWait=2
UnkillableStepTimeout=30
MinJobAge=300
JobRequeue=1
NodeName=node[0-{last}] NodeAddr={net}.[10-{last_address}] CPUs=8 CoresPerSocket=8 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_BOOT = """\
hostname "node$2" && mount --bind "$1/etc/hosts" /etc/hosts && ip link set lo up || exit 1
read -r plugged_in || exit 1
ip link set eth0 up && ip addr add "$3.$((10 + $2))/24" dev eth0 && ip route add default via "$3.1" || exit 1
slurmd -N "node$2" || exit 1
while :; do sleep 3600 & wait $!; done
"""
"""Shell script that the first process of a node runs. The last line reaps processes whose parents have ended."""


def why_impossible() -> str | None:
    """Return why this machine cannot run a Slurm cluster. Return None if it can."""
    if os.geteuid() != 0:
        return "needs root, to create namespaces and network bridges"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_search_path()) is None]
    if missing:
        return f"needs {', '.join(missing)}; Debian: make slurm-packages"
    probe = f"mftp{secrets.token_hex(3)}"
    for command in (
        ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--uts", "--net", "true"],
        ["ip", "link", "add", probe, "type", "bridge"],
        ["ip", "link", "del", probe],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=_environment(), check=False)
        if done.returncode != 0:
            return f"{' '.join(command)} is not permitted on this machine: {done.stderr.strip()}"
    return None


def wait_until(what: str, condition: Callable[[], object], *, seconds: float = DOWN_SECONDS) -> None:
    """Wait until ``condition`` is true.

    Raises:
        AssertionError: the condition was not true within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds:g} s waiting until: {what}"
        time.sleep(_PAUSE_SECONDS)


@dataclass
class SlurmCluster:
    """Slurm cluster on this machine, which runs between the calls of ``start`` and ``stop``."""

    num_nodes: int
    slurmd_timeout_seconds: int = 6
    topology: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Topology of the network: maps each leaf switch to its nodes. A further switch connects all leaf switches. If
    empty, the cluster has no topology."""
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="mft-slurm-")))
    _nodes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _inits: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        number = _claim_network()
        self.network = f"10.77.{number}"
        self._bridge = f"mft{number}"
        self._port = 20000 + 10 * number

    @property
    def address(self) -> str:
        """Return the IP address of this machine in the network of the cluster's nodes."""
        return f"{self.network}.1"

    def start(self) -> None:
        """Start all daemons of the cluster, and wait until all nodes are idle.

        Raises:
            AssertionError: a daemon did not start, or a node did not become idle in time.
        """
        for name in ("etc", "state", "spool", "log", "run"):
            (self.folder / name).mkdir()
        self._write_configuration()
        self.run("ip", "link", "set", self._bridge, "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", self._bridge)
        run, log = self.folder / "run", self.folder / "log"
        files = {"key-file": self.folder / "etc" / "munge.key", "socket": run / "munge.socket"}
        files |= {"pid-file": run / "munged.pid", "log-file": log / "munged.log", "seed-file": run / "munge.seed"}
        self.run("munged", "--force", "--num-threads=2", *(f"--{name}={path}" for name, path in files.items()))
        self.run("slurmctld", "-c")
        for node in range(self.num_nodes):
            self.boot(node)
        wait_until("all nodes are idle", lambda: len(self.nodes_in("idle")) == self.num_nodes, seconds=START_SECONDS)

    def stop(self) -> None:
        """End every process of the cluster, and remove its network and its folder."""
        with contextlib.ExitStack() as ending:  # each callback runs, even if another one fails
            ending.callback(shutil.rmtree, self.folder)
            ending.callback(self._remove_bridge)
            for daemon in ("munged", "slurmctld"):
                ending.callback(self._end, self.folder / "run" / f"{daemon}.pid")
            for node in self._nodes:
                ending.callback(self.kill_node, node)

    def _remove_bridge(self) -> None:
        if Path(f"/sys/class/net/{self._bridge}").exists():
            self.run("ip", "link", "del", self._bridge)

    # --- nodes -----------------------------------------------------------------------------------------------------

    def boot(self, node: int) -> None:
        """Start a node, for the first time or after it was killed."""
        assert node not in self._nodes, f"node{node} runs"
        (self.folder / "spool" / f"node{node}").mkdir(exist_ok=True)
        isolate = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts", "--net"]
        words = [*isolate, "bash", "-c", _BOOT, "node", str(self.folder), str(node), self.network]
        with (self.folder / "log" / f"boot.node{node}").open("ab") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        self._nodes[node] = process
        wait_until(f"node{node} has its namespaces", lambda: self._has_network(node), seconds=START_SECONDS)
        peer = ("peer", "name", "eth0", "netns", str(self._inits[node].pid))
        self.run("ip", "link", "add", self._cable(node), "type", "veth", *peer)
        self.run("ip", "link", "set", self._cable(node), "master", self._bridge, "up")
        assert process.stdin is not None, "a pipe"
        process.stdin.write(b"plugged in\n")
        process.stdin.close()

    def kill_node(self, node: int) -> None:
        """Kill a node as a loss of power does: disconnect it first, so that it cannot report its end. Then kill its
        first process, which ends all its processes."""
        process, init = self._nodes.pop(node), self._inits.pop(node, None)
        if Path(f"/sys/class/net/{self._cable(node)}").exists():
            self.run("ip", "link", "del", self._cable(node))
        if init is None:
            process.kill()
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                init.kill()
        process.wait()

    def stop_controller(self) -> None:
        """Kill slurmctld, the controller of the Slurm cluster. Running jobs continue."""
        daemon = psutil.Process(int((self.folder / "run" / "slurmctld.pid").read_text()))
        daemon.kill()
        gone = lambda: not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE  # noqa: E731
        wait_until("slurmctld has ended", gone, seconds=START_SECONDS)

    def start_controller(self) -> None:
        """Start slurmctld, the controller of the Slurm cluster, again with the state that it saved."""
        self.run("slurmctld")
        wait_until("slurmctld answers", self._answers, seconds=START_SECONDS)

    def _answers(self) -> bool:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, env=self.environment, check=False)
        return done.returncode == 0 and "is UP" in done.stdout

    def processes(self, node: int) -> list[psutil.Process]:
        """Return the processes of a node, with the process ids that they have on this machine."""
        return self._inits[node].children(recursive=True)

    def drain(self, node: int) -> None:
        """Set a node to the Slurm state ``drain``, as an administrator does."""
        self.run("scontrol", "update", f"nodename=node{node}", "state=drain", "reason=test")

    def cut(self, node: int) -> None:
        """Disconnect a node from the network of the other nodes. The processes of the node continue."""
        self.run("ip", "link", "set", self._cable(node), "down")

    def heal(self, node: int) -> None:
        """Reconnect a node that ``cut`` has disconnected."""
        self.run("ip", "link", "set", self._cable(node), "up")

    def nodes_in(self, *states: str) -> set[str]:
        """Return the names of the nodes whose state in ``sinfo`` is one of ``states``."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").split("\n")
        pairs = [line.split() for line in lines if line]
        return {name for name, state in pairs if state.rstrip("*$~#+-") in states}

    # --- jobs ------------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for commands of Slurm, and for the jobs that these commands submit."""
        return {**_environment(), "SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    def run(self, *command: str, extra: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run a command in the cluster's environment until it ends, and return its standard output.

        Raises:
            AssertionError: the command failed.
        """
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env={**self.environment, **(extra or {})},
            cwd=cwd,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def state_of(self, job: str) -> str:
        """Return the state of a Slurm job as ``scontrol`` shows it, e.g. ``RUNNING``."""
        words = self.run("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    # --- parts -----------------------------------------------------------------------------------------------------

    def _write_configuration(self) -> None:
        host, last = socket.gethostname().partition(".")[0], self.num_nodes - 1
        assert 0 <= last < 200, "addresses end below 255"
        about = {"dir": self.folder, "host": host, "net": self.network, "last": last, "last_address": 10 + last}
        ports = {"port": self._port, "slurmd_port": self._port + 1, "slurmd_timeout": self.slurmd_timeout_seconds}
        tree = "TopologyPlugin=topology/tree\n" if self.topology else ""
        (self.folder / "etc" / "slurm.conf").write_text(_CONF.format(**about, **ports) + tree)
        leaves = [
            f"SwitchName={switch} Nodes={','.join(f'node{node}' for node in nodes)}\n"
            for switch, nodes in self.topology.items()
        ]
        top = f"SwitchName=top Switches={','.join(self.topology)}\n" if self.topology else ""
        (self.folder / "etc" / "topology.conf").write_text("".join([*leaves, top]))
        names = [f"{self.network}.{10 + node} node{node}" for node in range(self.num_nodes)]
        lines = ["127.0.0.1 localhost", f"{self.address} {host}", *names]
        (self.folder / "etc" / "hosts").write_text("\n".join(lines) + "\n")
        key = self.folder / "etc" / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(1024))

    def _cable(self, node: int) -> str:
        return f"{self._bridge}n{node}"

    def _has_network(self, node: int) -> bool:
        """Return whether the node's first process has started and is in a network namespace of its own."""
        process = self._nodes[node]
        log = self.folder / "log" / f"boot.node{node}"
        assert process.poll() is None, f"node{node} did not start: {log.read_text()}"
        children = psutil.Process(process.pid).children()
        if not children:
            return False
        self._inits[node] = children[0]
        try:
            return os.readlink(f"/proc/{children[0].pid}/ns/net") != os.readlink("/proc/self/ns/net")
        except FileNotFoundError:
            return False

    def _end(self, pid_file: Path) -> None:
        """End the daemon whose process id is in ``pid_file``, and wait until it has ended."""
        if not pid_file.exists():
            return
        try:
            daemon = psutil.Process(int(pid_file.read_text()))
        except psutil.NoSuchProcess:
            return
        daemon.terminate()
        gone = lambda: not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE  # noqa: E731
        wait_until(f"{pid_file.stem} has ended", gone, seconds=START_SECONDS)


def _claim_network() -> int:
    """Create a bridge ``mftN``, and return N. The bridge reserves the network 10.77.N.0/24 for this cluster."""
    for number in sorted(range(1, 200), key=lambda _: secrets.randbits(32)):
        words = ("ip", "link", "add", f"mft{number}", "type", "bridge")
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            return number
        # Two clusters may start at once. Only one of them can create the bridge.
        assert "File exists" in done.stderr, f"{' '.join(words)}: {done.returncode}\n{done.stderr}"
    raise AssertionError("all networks 10.77.N.0/24 are in use")


def _search_path() -> str:
    return f"{os.environ.get('PATH', '')}:{_DAEMON_FOLDERS}"


def _environment() -> dict[str, str]:
    """Return this process's environment, without variables of the Slurm job in which this process may run."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}
    return {**inherited, "PATH": _search_path()}


@contextlib.contextmanager
def slurm_cluster(num_nodes: int, topology: Mapping[str, Sequence[int]] | None = None) -> Iterator[SlurmCluster]:
    """Start a Slurm cluster, and stop the cluster after the block, even after an error."""
    cluster = SlurmCluster(num_nodes, topology=topology or {})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()

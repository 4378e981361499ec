"""Reads the rank of a process that ``torchrun`` or ``srun`` started, from its environment variables. Pure.

Sources: PyTorch's documentation of torchrun (section "Environment Variables"), the manual page srun(1) (section "OUTPUT
ENVIRONMENT VARIABLES"), and ``fault_tolerance/launcher.py`` of nvidia-resiliency-ext 0.4.1. The ``ft_launcher`` of that
package extends torchrun and sets two further variables.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.config.job import RunConfig
from megatron_ft.control.ports import PORTS
from megatron_ft.errors import ConfigError

_KEY = "launch.mode"
_FT_LAUNCHER = "FT_RANK_MONITOR_IPC_SOCKET"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Values that ``torchrun`` or ``srun`` passes to a rank in environment variables. ``attempt`` is the number of
    restarts so far in which the rank's node took part."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    job_id: str
    attempt: int = 0
    max_restarts: int = 0
    """Largest number of times that the launcher restarts all ranks."""
    store_is_served: bool = False
    """Whether the launcher serves a ``TCPStore`` at the master's address. This store outlives restarts of ranks."""
    program: str = ""
    """Name of the command: ``torchrun``, ``ft_launcher`` (which works like torchrun) or ``srun``."""

    @property
    def node(self) -> int:
        """Index of this rank's node, if ranks are numbered node by node."""
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""
        return self.world_size // self.local_world_size

    def summary(self) -> str:
        """Describe the launcher of this rank, and what the launcher does when a rank is lost."""
        then = "ends the job step (srun --kill-on-bad-exit=1)"
        if self.launcher == "torchrun":
            then = (
                f"makes {self.program} start all ranks again from the newest checkpoint "
                f"(max_restarts={self.max_restarts})"
            )
            then = then if self.max_restarts else "ends the job"
        return (
            f"this process is a rank of {self.program}. Ranks: {self.world_size}, per node: {self.local_world_size}. "
            f'There is no controller and no agent: the loss of a rank {then} (docs/launch.md, section "Other '
            'launchers")'
        )

    def check_restarts(self, run: RunConfig) -> None:
        """Check that restarted ranks can find their run again, so that training does not start over in another folder.

        Ranks read the run's name from the launcher's store. In three cases, no store outlives a restart: ft_launcher,
        torchrun with another rendezvous than ``c10d``, and a requeued srun job. In these cases, the configuration
        must name the run.

        Raises:
            ConfigError: the configuration does not name the run, or has ``run.resume=never``.
        """
        # Without restarts, no rank has to find the run again. A store that outlives an attempt keeps the run's name.
        if self.store_is_served or not (self.max_restarts or self.attempt):
            return
        reason = (
            f"{self.program} may restart the ranks (restarts: {self.attempt}, limit: "
            f"{self.max_restarts}), and its store does not keep the run's name for the restarted ranks"
        )
        if run.name is None:
            raise ConfigError.of("run.name", "null", f"must be given together with run.resume=auto: {reason}")
        if run.resume == "never":
            raise ConfigError.of("run.resume", run.resume, f"must be 'auto' or 'must': {reason}")

    @classmethod
    def read(cls, mode: str, variables: Mapping[str, str], *, master_port: int = 0) -> "RankEnvironment":
        """Read the environment of this rank.

        Args:
            mode: ``torchrun`` or ``srun``.
            master_port: ``launch.master_port``; with 0, the port is derived from the ids of the Slurm job and step.

        Raises:
            ConfigError: a variable is missing, is not a number, or contradicts another variable.
        """
        assert mode in ("torchrun", "srun"), f"mode={mode}: must be torchrun or srun"
        environment = _torchrun(variables) if mode == "torchrun" else _srun(variables, master_port)
        _check(environment)
        return environment


def detect(variables: Mapping[str, str]) -> str:
    """Detect the launcher of this process: ``torchrun``, ``srun`` or ``local``, from environment variables.

    A torchrun started by srun counts as torchrun. An interactive shell inside a Slurm job step counts as srun, because
    it has the variables of a job step; set ``launch=local`` there.
    """
    if "TORCHELASTIC_RUN_ID" in variables and "RANK" in variables:
        return "torchrun"
    if "SLURM_PROCID" in variables and "SLURM_STEP_ID" in variables:
        return "srun"
    return "local"


def _torchrun(variables: Mapping[str, str]) -> RankEnvironment:
    return RankEnvironment(
        launcher="torchrun",
        rank=_number(variables, "RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE"),
        master_addr=_text(variables, "MASTER_ADDR"),
        master_port=_number(variables, "MASTER_PORT"),
        job_id=_text(variables, "TORCHELASTIC_RUN_ID"),
        attempt=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        max_restarts=int(variables.get("TORCHELASTIC_MAX_RESTARTS", "0")),
        store_is_served=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        program="ft_launcher" if _FT_LAUNCHER in variables else "torchrun",
    )


def _srun(variables: Mapping[str, str], master_port: int) -> RankEnvironment:
    # The step's own variables come first: a step can be smaller than its job.
    nodes = expand_nodelist(*_read(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    world_size = _number(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    per_node = _expand_counts(*_read(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(per_node) != len(nodes) or sum(per_node) != world_size:
        raise ConfigError.of(
            _KEY,
            "srun",
            f"Slurm's variables do not agree: {len(nodes)} nodes, {world_size} tasks, tasks per node {per_node}",
        )
    if len(set(per_node)) != 1:
        raise ConfigError.of(
            _KEY, "srun", f"must have the same number of tasks on every node; tasks per node are {per_node}"
        )
    job, step = _text(variables, "SLURM_JOB_ID"), _text(variables, "SLURM_STEP_ID")
    return RankEnvironment(
        launcher="srun",
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=per_node[0],
        master_addr=nodes[0],
        # Every task computes the same port without communication. The next step of the job computes another port.
        master_port=master_port or PORTS[(int(job) * 16 + int(step)) % len(PORTS)],
        job_id=f"{job}.{step}",
        attempt=int(variables.get("SLURM_RESTART_COUNT", "0")),
        program="srun",
    )


def _check(environment: RankEnvironment) -> None:
    def require(condition: bool, constraint: str) -> None:
        if not condition:
            raise ConfigError.of(_KEY, environment.launcher, constraint)

    rank, world_size, local = environment.rank, environment.world_size, environment.local_world_size
    per_node = f"{local} (ranks per node)"
    require(world_size >= 1 and 0 <= rank < world_size, f"rank {rank} must be from 0 to {world_size - 1}")
    require(local >= 1 and world_size % local == 0, f"world size {world_size} must be a multiple of {per_node}")
    require(0 <= environment.local_rank < local, f"local rank {environment.local_rank} must be below {per_node}")
    require(
        # ``node`` is computed from the rank, which is wrong if ranks are distributed cyclically over nodes.
        rank % local == environment.local_rank,
        f"rank {rank} has local rank {environment.local_rank}: the launcher must number ranks node by node (block "
        f"distribution), {local} on each node",
    )


def expand_nodelist(name: str, text: str) -> list[str]:
    """Expand a Slurm nodelist, e.g. ``a[01-03,7],b`` to ``a01 a02 a03 a7 b``, in the order of the list.

    Args:
        name: where the text comes from, e.g. an environment variable; used in messages.

    Raises:
        ConfigError: the text is not a nodelist.
    """
    try:
        hosts = [host for part in _split_outside_brackets(text) for host in _expand_part(part)]
    except ValueError as error:
        raise ConfigError.of(name, text, str(error)) from None
    if not hosts:
        raise ConfigError.of(name, text, "must name at least one node")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    return re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text) if _is_balanced(text) else [text]


def _is_balanced(text: str) -> bool:
    return re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text) is not None


def _expand_part(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if match is None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", part):
            raise ValueError("must be a Slurm nodelist such as node[0-3,7]")
        return [part]
    prefix, ranges, rest = match.groups()
    numbers = [number for piece in ranges.split(",") for number in _expand_range(piece)]
    return [host for number in numbers for host in _expand_part(f"{prefix}{number}{rest}")]


def _expand_range(piece: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
    if match is None:
        raise ValueError(f"has a range {piece!r}: must be a number or first-last, e.g. 7 or 0-3")
    first, last = match.group(1), match.group(2) or match.group(1)
    if not int(first) <= int(last) < int(first) + 1_000_000:
        raise ValueError(f"has a range {piece!r}: the end minus the start must be from 0 to 999999")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _expand_counts(name: str, text: str) -> list[int]:
    """Expand Slurm's tasks per node, e.g. ``2(x3),1`` to ``2 2 2 1``.

    Args:
        name: where the text comes from, e.g. an environment variable; used in messages.

    Raises:
        ConfigError: the text is not a list of tasks per node.
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if match is None:
            raise ConfigError.of(name, text, "must look like 2(x3),1")
        counts += [int(match.group(1))] * int(match.group(2) or "1")
    return counts


def _read(variables: Mapping[str, str], *names: str) -> tuple[str, str]:
    for name in names:
        if variables.get(name):
            return name, variables[name]
    raise ConfigError.of(" or ".join(names), None, "must be set: start the job with the launcher named by launch.mode")


def _text(variables: Mapping[str, str], *names: str) -> str:
    return _read(variables, *names)[1]


def _number(variables: Mapping[str, str], *names: str) -> int:
    name, text = _read(variables, *names)
    if not re.fullmatch(r"\d+", text):
        raise ConfigError.of(name, text, "must be a whole number")
    return int(text)

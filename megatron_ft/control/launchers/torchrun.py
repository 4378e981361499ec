"""Ranks that ``torchrun`` or ``srun`` started, read from their environment variables. Pure.

Sources: PyTorch's documentation of torchrun (section "Environment Variables"), the manual page srun(1) (section
"OUTPUT ENVIRONMENT VARIABLES"), nvidia-resiliency-ext 0.4.1, ``fault_tolerance/launcher.py``: its ``ft_launcher`` is
torchrun's successor and sets torchrun's variables and two of its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.config.run import RunConfig
from megatron_ft.errors import ConfigError

_KEY = "launch.mode"
_FIRST_PORT = 20000
_NUM_PORTS = 20000
_FT_LAUNCHER = "FT_RANK_MONITOR_IPC_SOCKET"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """A rank that another launcher started. ``attempt`` counts the restarts that its node took part in."""

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
    """Times that the launcher starts all ranks again."""
    store_is_served: bool = False
    """Whether the launcher already serves a ``TCPStore`` at the master's address, which outlives an attempt."""
    program: str = ""
    """The launcher's own name: ``ft_launcher`` works like ``torchrun``."""

    @property
    def node(self) -> int:
        """Number of this rank's node, ranks being dealt node by node."""
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""
        return self.world_size // self.local_world_size

    def summary(self) -> str:
        """Describe this start, and the consequence of a lost rank."""
        then = "end the step (srun --kill-on-bad-exit=1)"
        if self.launcher == "torchrun":
            then = f"have {self.program} start all again from the newest checkpoint, {self.max_restarts} times at most"
            then = then if self.max_restarts else "end the job"
        return (
            f"this process is a rank of {self.program}: {self.num_nodes} nodes x {self.local_world_size} ranks; there "
            f"are no node processes and no controller, so a lost rank will {then} (docs/launch.md, section "
            '"Other launchers")'
        )


def check_restarts(environment: RankEnvironment, run: RunConfig) -> None:
    """A start after the first has to find the run again.

    It asks the launcher's store for the name. Where none outlives an attempt (ft_launcher, torchrun with another
    rendezvous than ``c10d``, a requeued srun job), the configuration has to name the run, or training would start over
    in another folder.

    Raises:
        ConfigError: it does not.
    """
    # A single start never has to find the run again, and a store that outlives the attempt remembers its name.
    if environment.store_is_served or not (environment.max_restarts or environment.attempt):
        return
    reason = (
        f"{environment.program} starts ranks again (start {environment.attempt}, {environment.max_restarts} restarts) "
        "and keeps no store that remembers the run"
    )
    if run.name is None:
        raise ConfigError.of("run.name", "null", f"must be given, with run.resume=auto: {reason}")
    if run.resume == "never":
        raise ConfigError.of("run.resume", run.resume, f"must be auto or must: {reason}")


def detect(variables: Mapping[str, str]) -> str:
    """Detect the launcher of this process: ``torchrun``, ``srun`` or ``local``, from ``os.environ``.

    A torchrun started by srun counts as torchrun. An interactive shell inside a Slurm job step has
    ``SLURM_PROCID`` as well; choose ``launch=local`` there.
    """
    if "TORCHELASTIC_RUN_ID" in variables and "RANK" in variables:
        return "torchrun"
    if "SLURM_PROCID" in variables and "SLURM_STEP_ID" in variables:
        return "srun"
    return "local"


def read_environment(mode: str, variables: Mapping[str, str], *, master_port: int = 0) -> RankEnvironment:
    """The rank this process is.

    Args:
        mode: ``torchrun`` or ``srun``.
        master_port: ``launch.master_port``; 0 derives one from Slurm's job and step.

    Raises:
        ConfigError: a variable is missing, no number, or contradicts another.
    """
    assert mode in ("torchrun", "srun"), f"no environment of mode {mode}"
    environment = _torchrun(variables) if mode == "torchrun" else _srun(variables, master_port)
    _check(environment)
    return environment


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
    per_node = expand_counts(*_read(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(per_node) != len(nodes) or sum(per_node) != world_size:
        raise ConfigError.of(_KEY, "srun", f"tasks per node {per_node} must fit {len(nodes)} nodes, {world_size} tasks")
    if len(set(per_node)) != 1:
        raise ConfigError.of(_KEY, "srun", f"must have the same number of tasks on every node, has {per_node}")
    job, step = _text(variables, "SLURM_JOB_ID"), _text(variables, "SLURM_STEP_ID")
    return RankEnvironment(
        launcher="srun",
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=per_node[0],
        master_addr=nodes[0],
        # Every task computes the same port without a message, and the next step of the job another one.
        master_port=master_port or _FIRST_PORT + (int(job) * 16 + int(step)) % _NUM_PORTS,
        job_id=f"{job}.{step}",
        attempt=int(variables.get("SLURM_RESTART_COUNT", "0")),
        program="srun",
    )


def _check(environment: RankEnvironment) -> None:
    def require(condition: bool, constraint: str) -> None:
        if not condition:
            raise ConfigError.of(_KEY, environment.launcher, constraint)

    rank, world_size, local = environment.rank, environment.world_size, environment.local_world_size
    require(world_size >= 1 and 0 <= rank < world_size, f"rank {rank} must lie within world size {world_size}")
    require(local >= 1 and world_size % local == 0, f"world size {world_size} must be a multiple of {local} per node")
    require(0 <= environment.local_rank < local, f"local rank {environment.local_rank} must be below {local} per node")
    require(
        # ``node`` divides the rank by the ranks per node, which is wrong for tasks that are dealt cyclically.
        rank % local == environment.local_rank,
        f"rank {rank} with local rank {environment.local_rank}: must be dealt node by node (block), {local} per node",
    )


def expand_nodelist(name: str, text: str) -> list[str]:
    """Host names of a Slurm nodelist in its order, e.g. ``a[01-03,7],b`` gives ``a01 a02 a03 a7 b``.

    Args:
        name: where it was read, e.g. the variable.

    Raises:
        ConfigError: the text is no nodelist.
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
        raise ValueError(f"has a range {piece!r} that is no number or low-high")
    first, last = match.group(1), match.group(2) or match.group(1)
    if not int(first) <= int(last) < int(first) + 1_000_000:
        raise ValueError(f"has a range {piece!r} that does not rise")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def expand_counts(name: str, text: str) -> list[int]:
    """Slurm's tasks per node, e.g. ``2(x3),1`` gives ``2 2 2 1``.

    Args:
        name: where it was read, e.g. the variable.

    Raises:
        ConfigError: the text is no such list.
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if match is None:
            raise ConfigError.of(name, text, "must look like 2(x3),1")
        counts += [int(match.group(1))] * int(match.group(2) or "1")
    return counts


def _read(variables: Mapping[str, str], *names: str) -> tuple[str, str]:
    """The first of ``names`` that is set, and its value."""
    for name in names:
        if variables.get(name):
            return name, variables[name]
    raise ConfigError.of(" or ".join(names), None, "must be set by the launcher that launch.mode names")


def _text(variables: Mapping[str, str], *names: str) -> str:
    return _read(variables, *names)[1]


def _number(variables: Mapping[str, str], *names: str) -> int:
    name, text = _read(variables, *names)
    if not re.fullmatch(r"\d+", text):
        raise ConfigError.of(name, text, "must be a whole number")
    return int(text)

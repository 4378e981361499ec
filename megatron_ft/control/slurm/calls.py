"""Calls Slurm's commands, and parses what they print about a job and its nodes.

Source: the manual pages scontrol(1) and sinfo(1). Measured with Slurm 22.05: dead nodes disappear from ``NodeList`` of
a job with ``--no-kill``; ``BatchHost`` still names a dead host.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.control.launchers.torchrun import expand_nodelist
from megatron_ft.errors import ConfigError, ControlError

CALL_SECONDS = 60.0
"""Longest wait for an answer of Slurm. Slurm's own limit (``MessageTimeout``) is 10 s by default."""
_DRAINED = re.compile(r"(drained|draining|drng|drain)[*$~#!%^@+-]*", re.IGNORECASE)


class SlurmError(ControlError):
    """Raised if a command of Slurm fails. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class JobView:
    """State of a job as Slurm reports it."""

    state: str
    """State of the job, e.g. ``RUNNING``."""
    batch_host: str
    """Host of the batch script; empty before it has started."""
    hosts: tuple[str, ...]
    """Hosts of the job's nodes."""
    num_restarts: int = 0
    """Number of requeues of the job. Slurm increases it at once, while the job's processes are still ending."""
    excluded: tuple[str, ...] = ()
    """Hosts that are excluded from the job."""

    @property
    def has_batch_host(self) -> bool:
        """Whether the host of the batch script is among the job's hosts."""
        return self.batch_host in self.hosts

    @classmethod
    def parse(cls, text: str) -> "JobView":
        """Read the output of ``scontrol --oneliner show job`` for one job.

        Raises:
            SlurmError: the output has no job state, or an invalid list of nodes.
        """
        found = dict(word.split("=", 1) for word in text.split() if "=" in word)
        if "JobState" not in found:
            raise SlurmError(f"scontrol show job: the answer has no JobState: {text.strip()[:200]!r}")
        return cls(
            state=found["JobState"],
            batch_host=found.get("BatchHost", ""),
            hosts=_hosts("NodeList", found),
            num_restarts=int(found.get("Restarts", "0")),
            excluded=_hosts("ExcNodeList", found),
        )


def view_job(job_id: str) -> JobView:
    """Query Slurm for the state of a job.

    Raises:
        SlurmError: the job is unknown, or Slurm does not answer.
    """
    return JobView.parse(_call(["scontrol", "--oneliner", "show", "job", job_id]))


def _hosts(field: str, found: Mapping[str, str]) -> tuple[str, ...]:
    nodes = found.get(field, "")
    try:
        return () if nodes in ("", "(null)", "None") else tuple(expand_nodelist(field, nodes))
    except ConfigError as error:
        raise SlurmError(f"scontrol show job: cannot read the list of nodes: {error}") from None


def requeue(job_id: str) -> None:
    """Put the running job ``job_id`` back into the queue. Slurm then ends its processes, including this one.

    Raises:
        SlurmError: Slurm refuses to requeue the job.
    """
    _call(["scontrol", "requeue", job_id])


def exclude(job_id: str, hosts: Sequence[str]) -> None:
    """Exclude further hosts from a job that waits in the queue.

    Raises:
        SlurmError: Slurm refuses to exclude the hosts, e.g. because the job already runs.
    """
    if hosts:
        # ``ExcNodeList`` replaces the whole list, so it must also name the hosts that the user had excluded.
        every = dict.fromkeys([*view_job(job_id).excluded, *hosts])
        _call(["scontrol", "update", f"jobid={job_id}", f"ExcNodeList={','.join(every)}"])


def cancel_waiting(name: str) -> None:
    """Cancel this user's waiting jobs named ``name``: the later jobs of a chain.

    Raises:
        SlurmError: Slurm refuses to cancel them.
    """
    _call(["scancel", "--me", f"--name={name}", "--state=PENDING"])


def drained_hosts(hosts: Sequence[str]) -> list[str]:
    """Return all members of ``hosts`` that an administrator is draining or has drained in Slurm.

    Raises:
        SlurmError: Slurm does not answer.
    """
    return _parse_drained(_call(["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T"]))


def _parse_drained(text: str) -> list[str]:
    """Parse the output of ``sinfo --Node --format='%N %T'``. A node appears once for each of its partitions."""
    pairs = [line.split() for line in text.splitlines()]
    return sorted({pair[0] for pair in pairs if len(pair) == 2 and _DRAINED.fullmatch(pair[1])})


def array_hosts(job_id: str) -> dict[int, str]:
    """Return the host of each running task of a job array, by task index. Each task must have one node.

    Raises:
        SlurmError: the array is unknown, or Slurm does not answer.
    """
    return _parse_array_hosts(
        _call(["squeue", "--noheader", "--array", f"--job={job_id}", "--states=RUNNING", "--format=%K %N"])
    )


def _parse_array_hosts(text: str) -> dict[int, str]:
    """Parse the output of ``squeue --array --format='%K %N'`` into the host of each running task, by array index.

    Raises:
        SlurmError: a line is not an index followed by a host.
    """
    pairs = [line.split() for line in text.splitlines()]
    if strange := [pair for pair in pairs if len(pair) != 2 or not (pair[0].isascii() and pair[0].isdigit())]:
        raise SlurmError(f"squeue: a line must have a task index and a host, but is {' '.join(strange[0])[:200]!r}")
    return {int(index): host for index, host in pairs}


def run(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command of Slurm, and return its result, also if the exit code is not 0.

    Args:
        environment: environment of the command; None uses the environment of this process.

    Raises:
        SlurmError: the command cannot be run, or does not end in time.
    """
    try:
        return subprocess.run(
            command,
            env=environment,
            # A node ends when its standard input closes, so a command must not read from this input.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from None


def _call(command: Sequence[str]) -> str:
    done = run(command)
    if done.returncode != 0:
        raise SlurmError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout

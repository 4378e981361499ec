"""Entry point of a batch script: runs launchers one after the other until the run is over or continues in another
allocation.

``python -m megatron_ft.control.slurm.batch_job pretrain_moe.py OVERRIDES...`` starts ``python pretrain_moe.py
OVERRIDES...`` as a child. ``SIGUSR1`` means that Slurm will take the nodes away (``sbatch --signal=B:USR1@300``): the
launcher writes a checkpoint and ends, then the job is requeued or ends (``MFT_ON_WARNING``). ``SIGTERM`` ends the job.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron_ft.control.launchers.torchrun import expand_nodelist
from megatron_ft.control.rundir import is_claimed
from megatron_ft.control.slurm import calls
from megatron_ft.control.slurm.attempts import RunAttempts, Witness
from megatron_ft.control.slurm.drains import watch_drains
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, MegatronFtError
from megatron_ft.planning.recovery.job_attempts import (
    Asked,
    Attempt,
    AttemptPolicy,
    Next,
    Verdict,
    in_order_of_trust,
    to_exclude,
)

_STALE = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
"""Slurm's variables that launchers do not inherit, because they describe the allocation at the job's start."""
_DEFAULTS = {
    "SLURM_RESTART_COUNT": "0",
    "MFT_SPARE_NODES": "0",
    "MFT_MAX_FRUITLESS": "3",
    "MFT_ON_WARNING": "requeue",
    "MFT_DRAIN_POLL_SECONDS": "60",
    "MFT_CONSOLE_SECONDS": "1800",
}
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Settings of a batch job, from environment variables of Slurm and of the site (``slurm/site.env``)."""

    job_id: str
    hosts: tuple[str, ...]
    """Hosts of the allocation."""
    num_spares: int
    max_fruitless: int
    on_warning: Next
    is_chained: bool
    """Whether later jobs with this job's name wait to continue the run (a chain of jobs)."""
    job_name: str
    final_exit_code: int | None
    """Exit code of a job that leaves the run incomplete and is not continued; None uses the launcher's exit code."""
    num_restarts: int
    """Number of times that Slurm has requeued the job."""
    drain_poll_seconds: float
    patience_seconds: float
    """Longest wait for the launcher of an earlier job to end."""

    @staticmethod
    def read(variables: Mapping[str, str]) -> "_Site":
        """Read the settings from environment variables.

        Raises:
            ConfigError: a variable is invalid, or this process is in no batch job.
        """
        values = {**_DEFAULTS, **{name: text for name, text in variables.items() if text}}
        for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
            if name not in values:
                raise ConfigError.of(name, "", "must be set: this command must run in a batch job of Slurm")
        ways = {"requeue": Next.REQUEUE, "end": Next.END}
        if values["MFT_ON_WARNING"] not in ways:
            raise ConfigError.of("MFT_ON_WARNING", values["MFT_ON_WARNING"], "must be one of requeue, end")
        is_chained = values.get("MFT_CHAINED", "") == "1"
        if is_chained and "SLURM_JOB_NAME" not in values:
            raise ConfigError.of(
                "SLURM_JOB_NAME", "", "must be set with MFT_CHAINED=1: the jobs of a chain are found by their name"
            )
        final = values.get("MFT_FINAL_EXIT_CODE")
        return _Site(
            job_id=values["SLURM_JOB_ID"],
            hosts=tuple(expand_nodelist("SLURM_JOB_NODELIST", values["SLURM_JOB_NODELIST"])),
            num_spares=_number(values, "MFT_SPARE_NODES"),
            max_fruitless=_number(values, "MFT_MAX_FRUITLESS", least=1),
            on_warning=ways[values["MFT_ON_WARNING"]],
            is_chained=is_chained,
            job_name=values.get("SLURM_JOB_NAME", ""),
            final_exit_code=None if final is None else _number(values, "MFT_FINAL_EXIT_CODE", least=1, most=255),
            num_restarts=_number(values, "SLURM_RESTART_COUNT"),
            drain_poll_seconds=float(_number(values, "MFT_DRAIN_POLL_SECONDS", least=1)),
            patience_seconds=float(_number(values, "MFT_CONSOLE_SECONDS")),
        )


def _number(values: Mapping[str, str], name: str, *, least: int = 0, most: int = 1_000_000) -> int:
    text = values[name]
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise ConfigError.of(name, text, f"must be a whole number from {least} to {most}")
    return int(text)


class _BatchJob:
    """Runs the launchers of a batch job."""

    def __init__(self, site: _Site, command: Sequence[str]) -> None:
        """Prepare to run ``command``, a program and its overrides, which must include ``run.dir`` and ``run.name``."""
        self._site = site
        self._command = list(command)
        run_dir, name = self._value("run.dir"), self._value("run.name")
        if run_dir is None or name is None:
            raise ConfigError.of(
                "run.name", name, "must be given together with run.dir: a requeued job finds its run by both keys"
            )
        self._run_dir = Path(run_dir) / name
        self._num_nodes = self._count("launch.num_nodes", len(site.hosts) - site.num_spares)
        self._most_spares = self._count("nodes.num_spare_nodes", site.num_spares)
        self._asked: Asked | None = None
        self._has_to_forward = False
        """Whether a signal was received that has not been forwarded to the launcher yet."""
        self._console: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run launchers until the job is over in this allocation. Return the job's exit code."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._ask)
        site, hosts = self._site, list(self._site.hosts)
        # A marker remains if this job had ended and was then requeued from outside.
        RunAttempts(self._run_dir).marker_of(site.job_id).unlink(missing_ok=True)
        attempts = self._earlier()
        is_first = not attempts and site.num_restarts == 0 and not site.is_chained
        if not is_first:
            self._await_folder()
        while True:
            hosts = in_order_of_trust(hosts, attempts)
            attempt = self._attempt(hosts, is_first=is_first)
            if self._run_dir.is_dir():
                # The attempt is on disk before any call of Slurm, because a requeue ends this process.
                RunAttempts(self._run_dir).add(attempt)
            attempts.append(attempt)
            is_first = False
            view = self._view(hosts)
            if view.num_restarts > site.num_restarts:
                return self._was_requeued(attempt)
            hosts = list(view.hosts)
            verdict = self._policy.decide(attempts, hosts)
            print(f"job {site.job_id}: {verdict.next.value}: {verdict.reason}", file=sys.stderr, flush=True)
            if verdict.next is Next.REQUEUE:
                verdict = self._requeue(to_exclude(attempts))
            if verdict.next is Next.END:
                return self._end(attempt, verdict)

    @property
    def _policy(self) -> AttemptPolicy:
        site = self._site
        return AttemptPolicy(num_nodes=self._num_nodes, max_fruitless=site.max_fruitless, on_warning=site.on_warning)

    def _earlier(self) -> list[Attempt]:
        # Return the attempts of this job, also those before a requeue. In a chain, return the attempts of all its jobs.
        return [
            attempt
            for attempt in RunAttempts(self._run_dir).read()
            if self._site.is_chained or attempt.job_id == self._site.job_id
        ]

    def _await_folder(self) -> None:
        # An earlier launcher may still run, on a machine that Slurm cannot reach. Wait for its end, because only one
        # launcher may use the run's folder.
        deadline = time.monotonic() + self._site.patience_seconds
        if is_claimed(self._run_dir):
            print(
                f"job {self._site.job_id}: waiting for an earlier launcher of this run to end",
                file=sys.stderr,
                flush=True,
            )
        while is_claimed(self._run_dir) and self._asked is None and time.monotonic() < deadline:
            threading.Event().wait(_LOOK_SECONDS)

    def _attempt(self, hosts: Sequence[str], *, is_first: bool) -> Attempt:
        # Run a launcher until it ends. If the job was asked to stop already, start no launcher.
        spares = max(0, min(self._most_spares, len(hosts) - self._num_nodes))
        words = [f"launch.num_nodes={self._num_nodes}", f"nodes.num_spare_nodes={spares}"]
        command = [sys.executable, *self._command, *words, *([] if is_first else ["run.resume=auto"])]
        witness = Witness.begin(self._run_dir, hosts)
        if self._asked is not None:
            return self._attempt_of(witness, EXIT_INTERRUPTED)
        with subprocess.Popen(command, env=_environment(hosts)) as self._console:
            # A signal that arrived before the launcher started has not been forwarded yet.
            self._forward()
            with watch_drains(self._run_dir, hosts, poll_seconds=self._site.drain_poll_seconds):
                exit_code = self._console.wait()
        self._console = None
        return self._attempt_of(witness, exit_code)

    def _attempt_of(self, witness: Witness, exit_code: int) -> Attempt:
        return Attempt(
            job_id=self._site.job_id,
            hosts=tuple(witness.hosts),
            exit_code=exit_code,
            asked=self._asked,
            iteration=RunAttempts(self._run_dir).newest_iteration(),
            lost_hosts=witness.lost_hosts(),
            failed_hosts=witness.failed_hosts(),
            is_complete=witness.is_complete(),
            has_timed_out=witness.has_timed_out(),
        )

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        # Handle a signal. The first signal lets ranks finish their iteration and write a checkpoint. A SIGUSR1 after
        # SIGTERM must not turn the order to end into a requeue.
        if self._asked is None or number == signal.SIGTERM:
            self._asked = Asked(signal.Signals(number).name)
        self._has_to_forward = True
        self._forward()

    def _forward(self) -> None:
        # Forward each signal only once, because a launcher that receives two signals ends its ranks at once.
        if self._has_to_forward and self._console is not None:
            self._has_to_forward = False
            self._console.terminate()

    def _end(self, attempt: Attempt, verdict: Verdict) -> int:
        exit_code = _as_exit_code(attempt)
        if verdict.is_final and exit_code != EXIT_OK and self._site.final_exit_code is not None:
            exit_code = self._site.final_exit_code
        if self._run_dir.is_dir():
            RunAttempts(self._run_dir).leave_marker(
                self._site.job_id,
                exit_code=exit_code,
                reason=verdict.reason,
                is_final=verdict.is_final,
            )
        # Jobs are cancelled after the marker is written, because a call of Slurm may take a minute or fail.
        if verdict.is_final and self._site.is_chained:
            self._cancel_chain()
        return exit_code

    def _cancel_chain(self) -> None:
        # Cancel the jobs that wait to continue the run; one that starts nevertheless ends by itself.
        site = self._site
        try:
            calls.cancel_waiting(site.job_name)
        except calls.SlurmError as error:
            print(
                f"job {site.job_id}: cannot cancel the waiting jobs named {site.job_name}: {error}",
                file=sys.stderr,
                flush=True,
            )

    def _view(self, hosts: Sequence[str]) -> calls.JobView:
        # Return the job's state as Slurm reports it. If Slurm does not answer, assume that the job has all its nodes.
        try:
            return calls.view_job(self._site.job_id)
        except calls.SlurmError as error:
            print(
                f"job {self._site.job_id}: cannot query Slurm, assuming that the job has all its nodes: {error}",
                file=sys.stderr,
                flush=True,
            )
            return calls.JobView("RUNNING", "", tuple(hosts), self._site.num_restarts)

    def _was_requeued(self, attempt: Attempt) -> int:
        # Return the exit code after a requeue by others. The job has not ended, so no marker is written.
        print(f"job {self._site.job_id}: an administrator or Slurm has requeued the job", file=sys.stderr, flush=True)
        return _as_exit_code(attempt)

    def _requeue(self, exclude: Sequence[str]) -> Verdict:
        # Requeue the job. Slurm then ends this process. Return a verdict if Slurm refuses.
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # this process must still exclude hosts
        try:
            calls.requeue(self._site.job_id)
        except calls.SlurmError as error:
            return Verdict(Next.END, f"Slurm did not requeue the job: {error}")
        try:
            calls.exclude(self._site.job_id, exclude)
        except calls.SlurmError as error:
            print(
                f"job {self._site.job_id}: cannot exclude {', '.join(exclude)}; Slurm may assign them again: {error}",
                file=sys.stderr,
                flush=True,
            )
        # Wait until Slurm ends this process: an exit code would end the job instead of letting it continue.
        while True:
            signal.pause()

    def _count(self, key: str, default: int) -> int:
        text = self._value(key)
        return default if text is None else _number({key: text}, key)

    def _value(self, key: str) -> str | None:
        found = [word.partition("=")[2] for word in self._command if word.partition("=")[0].lstrip("+") == key]
        return found[-1] if found else None


def _as_exit_code(attempt: Attempt) -> int:
    assert attempt.exit_code is not None, "the attempt has no exit code"
    return attempt.exit_code if attempt.exit_code >= 0 else 128 - attempt.exit_code


def _environment(hosts: Sequence[str]) -> dict[str, str]:
    """Return a copy of this process's environment in which Slurm's variables describe the present nodes of the
    allocation. Slurm sets these variables at the job's start and does not change them later."""
    nodes, count = ",".join(hosts), str(len(hosts))
    now = {"SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes, "SLURM_JOB_NUM_NODES": count, "SLURM_NNODES": count}
    return {**{name: text for name, text in os.environ.items() if name not in _STALE}, **now}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run launchers until the job is over in this allocation (the command of this module). Return the exit code."""
    command = sys.argv[1:] if arguments is None else arguments
    try:
        return _BatchJob(_Site.read(os.environ), command).run()
    except MegatronFtError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

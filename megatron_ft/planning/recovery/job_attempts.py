"""Decides what a batch job does after its training command has ended: another attempt, a requeue, or the end.

Every run of the command is an attempt, which is recorded in ``attempts.jsonl`` in the run's folder.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, FINAL_EXIT_CODES

# A single failure may be a coincidence.
MOST_FAILURES = 2
"""A host with at least this many failures in the newest ``MEMORY`` attempts is used only if other hosts are too few."""
MEMORY = 10
"""Number of newest attempts whose failures count. Older failures are ignored, because any machine fails at times."""


class Asked(enum.Enum):
    """Signals that Slurm sends to the batch script of a job: a warning, or the request to end."""

    TO_GO_ON_LATER = "SIGUSR1"
    """Warning that the time limit is near or the job is preempted; the run can continue in another allocation."""
    TO_END = "SIGTERM"


class Next(enum.Enum):
    """Action of the batch job after an attempt."""

    END = "end"
    AGAIN = "again"
    """Start another attempt in the same allocation."""
    REQUEUE = "requeue"
    """Requeue the job, which gets another allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of the training command."""

    job_id: str
    hosts: tuple[str, ...]
    """Hosts of the allocation, in the order of node numbers."""
    exit_code: int | None
    """Exit code of the command, or the negative number of the signal that killed it; None if the end was not observed,
    for example because the node failed."""
    asked: Asked | None
    iteration: int
    """Newest iteration that the run had reported when the attempt ended; 0 if it had reported none."""
    lost_hosts: tuple[str, ...] = ()
    """Hosts of nodes that were lost."""
    failed_hosts: tuple[str, ...] = ()
    """Host of the first failed rank of each failure; a host may occur several times."""
    is_complete: bool = False
    """Whether the run was complete at the end of the attempt."""
    has_timed_out: bool = False
    """Whether ``training.exit_after_minutes`` stopped the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPolicy:
    """Rules by which a batch job decides whether to run its training command again."""

    num_nodes: int
    """Smallest number of nodes with which an attempt can start."""
    max_fruitless: int = 3
    """Number of consecutive attempts without progress after which the job ends."""
    on_warning: Next = Next.REQUEUE
    """Action after a warning (``Asked.TO_GO_ON_LATER``) or if a failure leaves too few usable nodes: ``REQUEUE``, or
    ``END`` if another job continues the run."""

    def decide(self, attempts: Sequence[Attempt], hosts: Sequence[str]) -> "Verdict":
        """Decide what the batch job does after the last of ``attempts``.

        Args:
            hosts: present hosts of the allocation.
        """
        last = attempts[-1]
        assert last.exit_code is not None, "the last attempt has no exit code"
        if last.exit_code == EXIT_OK and last.is_complete:
            return Verdict(Next.END, "the run is complete", is_final=True)
        # Checked before every case with another attempt: for example, an invalid configuration is invalid on all nodes.
        if last.exit_code in FINAL_EXIT_CODES:
            return Verdict(
                Next.END, f"exit code {last.exit_code}: another attempt would end the same way", is_final=True
            )
        is_stopped = last.exit_code == EXIT_INTERRUPTED and last.asked is None
        if last.asked is Asked.TO_END or (is_stopped and not last.has_timed_out):
            return Verdict(Next.END, "the run received a signal to end", is_final=True)
        # The run is not complete, but its configuration may end each job after some iterations or minutes.
        if last.exit_code == EXIT_OK or is_stopped:
            return Verdict(Next.END, "the job has ended as planned, before the end of the run")
        # Checked before a requeue: a job that always fails at the same place would occupy the cluster without end.
        no_progress = why_hopeless(attempts, self.max_fruitless)
        if no_progress is not None:
            return Verdict(Next.END, no_progress, is_final=True)
        if last.asked is Asked.TO_GO_ON_LATER:
            return Verdict(self.on_warning, "the nodes will be taken away (warning signal)")
        # ``hosts`` may still contain hosts that the last attempt lost.
        usable = len(set(hosts) - set(last.lost_hosts) - set(to_exclude(attempts)))
        how = f"exit code {last.exit_code}" if last.exit_code >= 0 else f"killed by signal {-last.exit_code}"
        if usable >= self.num_nodes:
            return Verdict(Next.AGAIN, f"{how}; usable nodes: {usable}, needed: {self.num_nodes}")
        lacking = f"{how}; too few usable nodes: {usable}, needed: {self.num_nodes}"
        return Verdict(self.on_warning, lacking)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision of a batch job after an attempt (a run of its training command): the next action, and the reason."""

    next: Next
    reason: str
    is_final: bool = False
    """Whether the run must not be continued by another job: it is complete, or the user must change something first."""


def why_hopeless(attempts: Sequence[Attempt], max_fruitless: int) -> str | None:
    """Return the reason to end the job after too many attempts without progress; None if the job may try again."""
    fruitless = _num_fruitless(attempts)
    if fruitless < max_fruitless:
        return None
    newest = max(attempt.iteration for attempt in attempts)
    return f"consecutive attempts without progress beyond iteration {newest}: {fruitless}"


def _num_fruitless(attempts: Sequence[Attempt]) -> int:
    """Return the number of newest consecutive attempts without progress. An attempt makes progress if it reaches a
    later iteration than all attempts before it."""
    count, reached = 0, 0
    for attempt in attempts:
        count = 0 if attempt.iteration > reached else count + 1
        reached = max(reached, attempt.iteration)
    return count


def to_exclude(attempts: Sequence[Attempt]) -> list[str]:
    """Return the hosts with at least ``MOST_FAILURES`` failures, sorted."""
    failures = _failures(attempts)
    return sorted(host for host, count in failures.items() if count >= MOST_FAILURES)


def in_order_of_trust(hosts: Sequence[str], attempts: Sequence[Attempt]) -> list[str]:
    """Sort hosts by their number of failures, in a stable order; hosts that the last attempt lost come last."""
    failures = _failures(attempts)
    lost = set(attempts[-1].lost_hosts) if attempts else set()
    return sorted(hosts, key=lambda host: (host in lost, failures[host]))


def _failures(attempts: Sequence[Attempt]) -> Counter[str]:
    return Counter(host for attempt in attempts[-MEMORY:] for host in (*attempt.lost_hosts, *attempt.failed_hosts))

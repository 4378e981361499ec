"""Decision of a batch job when its training command has ended: another attempt on the same nodes, requeue, or end.

Pure. Every run of the command is an attempt, recorded in ``attempts.jsonl`` of the run's folder.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, FINAL_EXIT_CODES

# One failure can be chance.
MOST_FAILURES = 2
"""A node with this many failures in the newest attempts is not used while there are enough others."""
MEMORY = 10
"""Number of newest attempts whose failures count: over weeks every machine fails at some time."""


class Asked(enum.Enum):
    """Signal that the batch script received."""

    TO_GO_ON_LATER = "SIGUSR1"
    """The time limit is near, or the job is preempted."""
    TO_END = "SIGTERM"


class Next(enum.Enum):
    """Step after an attempt."""

    END = "end"
    AGAIN = "again"
    """Another attempt in the same allocation."""
    REQUEUE = "requeue"
    """Requeue the job, which gets another allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of the training command."""

    job_id: str
    hosts: tuple[str, ...]
    """Hosts of the allocation, in the order of node numbers."""
    exit_code: int | None
    """Exit code; negative for the signal that ended it; None if its end was not seen, as when its node died."""
    asked: Asked | None
    iteration: int
    """Newest iteration that the run had reported at its end; 0 for none."""
    lost_hosts: tuple[str, ...] = ()
    """Hosts of nodes that were lost."""
    failed_hosts: tuple[str, ...] = ()
    """Hosts on which a rank failed first; may contain a host several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPolicy:
    """Limits of attempts."""

    num_nodes: int
    """Fewest nodes of an attempt."""
    max_fruitless: int = 3
    """Attempts in a row without progress after which the job gives up."""
    on_warning: Next = Next.REQUEUE
    """Step after ``Asked.TO_GO_ON_LATER``: ``REQUEUE``, or ``END`` if another job takes over."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Step after an attempt and the reason for it."""

    next: Next
    reason: str
    is_final: bool = False
    """Whether the run is complete, or cannot continue without a change by the user: no other job should try."""


def decide(attempts: Sequence[Attempt], policy: AttemptPolicy, hosts: Sequence[str]) -> Verdict:
    """Decide the step after the last of ``attempts``.

    Args:
        hosts: present hosts of the allocation.
    """
    last = attempts[-1]
    assert last.exit_code is not None, "the last attempt has no exit code"
    if last.exit_code == EXIT_OK:
        return Verdict(Next.END, "the run has ended as planned", is_final=True)
    # Before anything else that could start it again: a configuration that is refused now is refused on every node.
    if last.exit_code in FINAL_EXIT_CODES:
        return Verdict(Next.END, f"exit code {last.exit_code}: another attempt would end the same way", is_final=True)
    if last.asked is Asked.TO_END or (last.exit_code == EXIT_INTERRUPTED and last.asked is None):
        return Verdict(Next.END, "it was asked to end", is_final=True)
    # Also before a requeue: a job that fails at the same place each time would occupy the cluster without end.
    no_progress = why_hopeless(attempts, policy.max_fruitless)
    if no_progress is not None:
        return Verdict(Next.END, no_progress, is_final=True)
    if last.asked is Asked.TO_GO_ON_LATER:
        return Verdict(policy.on_warning, "the nodes will be taken away (warning signal)")
    # ``hosts`` may still contain those that the last attempt lost.
    usable = len(set(hosts) - set(last.lost_hosts) - set(to_exclude(attempts)))
    how = f"exit code {last.exit_code}" if last.exit_code >= 0 else f"killed by signal {-last.exit_code}"
    if usable >= policy.num_nodes:
        return Verdict(Next.AGAIN, f"{how}; {usable} nodes remain, {policy.num_nodes} are needed")
    lacking = f"{how}; only {usable} nodes remain, {policy.num_nodes} are needed"
    return Verdict(policy.on_warning, lacking)


def why_hopeless(attempts: Sequence[Attempt], max_fruitless: int) -> str | None:
    """Return a reason to give up because of attempts without progress; None if another attempt is allowed."""
    fruitless = num_fruitless(attempts)
    if fruitless < max_fruitless:
        return None
    newest = max(attempt.iteration for attempt in attempts)
    return f"{fruitless} attempts in a row made no progress beyond iteration {newest}"


def num_fruitless(attempts: Sequence[Attempt]) -> int:
    """Return the number of last attempts that made no progress; the first attempt must complete an iteration."""
    count, reached = 0, 0
    for attempt in attempts:
        count = 0 if attempt.iteration > reached else count + 1
        reached = max(reached, attempt.iteration)
    return count


def to_exclude(attempts: Sequence[Attempt]) -> list[str]:
    """Hosts that have failed too often, sorted."""
    failures = _failures(attempts)
    return sorted(host for host, count in failures.items() if count >= MOST_FAILURES)


def in_order_of_trust(hosts: Sequence[str], attempts: Sequence[Attempt]) -> list[str]:
    """Sort hosts by number of failures, in a stable order; hosts of nodes lost in the last attempt come last."""
    failures = _failures(attempts)
    lost = set(attempts[-1].lost_hosts) if attempts else set()
    return sorted(hosts, key=lambda host: (host in lost, failures[host]))


def _failures(attempts: Sequence[Attempt]) -> Counter[str]:
    return Counter(host for attempt in attempts[-MEMORY:] for host in (*attempt.lost_hosts, *attempt.failed_hosts))

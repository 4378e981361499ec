"""What a batch job does when its console has ended: starts another on the same nodes, goes back to the queue, or ends.

Pure. A console that ends is an attempt; what is known of each is in ``attempts.jsonl`` of the run's folder.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, FINAL_EXIT_CODES

MOST_FAILURES = 2
"""A node with so many, in the newest attempts, is not used again while there are others."""
MEMORY = 10
"""Attempts that failures are remembered for: in weeks every machine fails at some time."""


class Asked(enum.Enum):
    """Why the batch script was asked to stop."""

    TO_GO_ON_LATER = "SIGUSR1"
    """The time limit is near, or the nodes are wanted by somebody else."""
    TO_END = "SIGTERM"


class Next(enum.Enum):
    """What follows an attempt."""

    END = "end"
    AGAIN = "again"
    """Another console, in the same allocation."""
    REQUEUE = "requeue"
    """The job goes back to the queue and gets another allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One console's life."""

    job_id: str
    hosts: tuple[str, ...]
    """Of the allocation, in the order of our node numbers."""
    exit_code: int | None
    """Negative: the signal that ended it. None where nobody has seen its end, as when its node died."""
    asked: Asked | None
    iteration: int
    """Newest that the run had reported when it ended; 0 for none."""
    lost_hosts: tuple[str, ...] = ()
    """Those of nodes that were lost whole."""
    failed_hosts: tuple[str, ...] = ()
    """Those where a rank was the first to fail. A host may be in there more than once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPolicy:
    """What a job may do."""

    num_nodes: int
    """Fewest that it starts with."""
    max_fruitless: int = 3
    """Attempts in a row that get no further than an earlier one, until no other is made."""
    on_warning: Next = Next.REQUEUE
    """After ``Asked.TO_GO_ON_LATER``: ``REQUEUE``, or ``END`` where another job takes over."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows, and why."""

    next: Next
    reason: str
    is_final: bool = False
    """The run is over, or goes on only when somebody has mended something: no other job need try."""


def decide(attempts: Sequence[Attempt], policy: AttemptPolicy, hosts: Sequence[str]) -> Verdict:
    """What follows the last of ``attempts``.

    Args:
        hosts: those that the allocation has now.
    """
    last = attempts[-1]
    assert last.exit_code is not None, "who asks has seen its end"
    if last.exit_code == EXIT_OK:
        return Verdict(Next.END, "the run has ended as planned", is_final=True)
    if last.exit_code in FINAL_EXIT_CODES:
        return Verdict(Next.END, f"exit code {last.exit_code}: another attempt would end alike", is_final=True)
    if last.asked is Asked.TO_END or (last.exit_code == EXIT_INTERRUPTED and last.asked is None):
        return Verdict(Next.END, "it was asked to end", is_final=True)
    hopeless = why_hopeless(attempts, policy.max_fruitless)
    if hopeless is not None:
        return Verdict(Next.END, hopeless, is_final=True)
    if last.asked is Asked.TO_GO_ON_LATER:
        return Verdict(policy.on_warning, "it was warned that its nodes will be taken away")
    usable = len(set(hosts) - set(last.lost_hosts) - set(to_exclude(attempts)))
    how = f"exit code {last.exit_code}" if last.exit_code >= 0 else f"killed by signal {-last.exit_code}"
    if usable >= policy.num_nodes:
        return Verdict(Next.AGAIN, f"{how}; {usable} nodes are left, {policy.num_nodes} needed")
    lacking = f"{how}; {usable} nodes are left of {policy.num_nodes} needed"
    return Verdict(policy.on_warning, lacking)


def why_hopeless(attempts: Sequence[Attempt], max_fruitless: int) -> str | None:
    """Why no other attempt is made: so many in a row got the run no further. None where another may.

    Args:
        max_fruitless: as in ``AttemptPolicy``.
    """
    fruitless = num_fruitless(attempts)
    if fruitless < max_fruitless:
        return None
    newest = max(attempt.iteration for attempt in attempts)
    return f"{fruitless} attempts in a row made no progress: none came beyond iteration {newest}"


def num_fruitless(attempts: Sequence[Attempt]) -> int:
    """Attempts at the end of the list that came no further than one before them; the first one has to get anywhere."""
    count, reached = 0, 0
    for attempt in attempts:
        count = 0 if attempt.iteration > reached else count + 1
        reached = max(reached, attempt.iteration)
    return count


def to_exclude(attempts: Sequence[Attempt]) -> list[str]:
    """Hosts that have failed too often, in the order of their names."""
    failures = _failures(attempts)
    return sorted(host for host, count in failures.items() if count >= MOST_FAILURES)


def in_order_of_trust(hosts: Sequence[str], attempts: Sequence[Attempt]) -> list[str]:
    """Hosts with the fewest failures first, in their own order where equal; those that were lost just now come last."""
    failures = _failures(attempts)
    lost = set(attempts[-1].lost_hosts) if attempts else set()
    return sorted(hosts, key=lambda host: (host in lost, failures[host]))


def _failures(attempts: Sequence[Attempt]) -> Counter[str]:
    return Counter(host for attempt in attempts[-MEMORY:] for host in (*attempt.lost_hosts, *attempt.failed_hosts))

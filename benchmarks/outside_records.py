"""Evaluates each fault of a ``faults-from-outside`` job from the job's files: its losses, and the time to form the next
membership."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.outside_driver import losses_since

MAX_FORMING_SECONDS = 3.0

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """Observations of one fault, from outside and from the run's own files."""

    fault: Event
    """Fault as it was drawn."""
    seen: Event
    """Record of the driver; empty if the job did not reach the fault."""
    healthy_lost: tuple[int, ...]
    """Nodes that were lost although no fault had hit them."""
    forming_seconds: float | None
    """Time from the detection of the last fault of a group to the next membership, without the time of replayed
    iterations; None if no membership followed."""
    strategies: tuple[str, ...]
    """Strategies of the memberships that followed."""
    num_restarts: int
    problems: tuple[str, ...]

    @property
    def is_proven(self) -> bool:
        """Return whether the kernel showed that the fault happened."""
        return bool(self.seen.get("proven"))

    @property
    def is_foretold(self) -> bool:
        """Return whether ``can_recover`` predicted that the job would survive the fault."""
        return bool(self.seen.get("answer", {}).get("survives"))


def read_faults(
    faults: Sequence[Event],
    seen: Sequence[Event],
    events: Sequence[Event],
    orders: Sequence[Event],
    *,
    max_forming_seconds: float = MAX_FORMING_SECONDS,
) -> list[FaultRecord]:
    """Return a record for each fault of a job.

    Args:
        max_forming_seconds: A membership that takes longer to form is a problem.
    """
    by_number = {each["fault"]: each for each in seen}
    starts = [each["injected_at"] for each in seen if "injected_at" in each]
    records = []
    for fault in faults:
        mine = by_number.get(fault["fault"], {})
        since = mine.get("injected_at")
        if since is None:
            records.append(_unreached(fault, mine))
            continue
        until = next((start for start in starts if start > since), float("inf"))
        stretch = _between(events, since, until), _between(orders, since, until)
        records.append(_read(fault, mine, *stretch, max_forming_seconds))
    return records


def _read(
    fault: Event, seen: Event, events: Sequence[Event], orders: Sequence[Event], max_forming_seconds: float
) -> FaultRecord:
    victims = set(seen["lost"]) | _named(seen)
    losses = losses_since(events, orders, seen["injected_at"])
    healthy = sorted({node for _, node in losses} - victims)
    strategies = tuple(event["strategy"] for event in events if event["kind"] == "recovery_started")
    num_restarts = sum(event["kind"] == "ranks_restarted" for event in events)
    forming = _forming_seconds(seen, events, orders)
    problems = [seen["problem"]] if "problem" in seen else []
    answer = seen["answer"]
    problems += [f"healthy nodes {healthy} were lost"] if healthy and answer["survives"] else []
    if answer["survives"] and seen["lost"] and "problem" not in seen:
        wanted = answer["strategy"]
        others = sorted(set(strategies) - {wanted})
        # Nodes that join after the loss form memberships, too. In jobs with replicas, these continue with replicas.
        problems += [f"the job continued with {', '.join(others)}, but {wanted} was predicted"] if others else []
        problems += [f"{num_restarts} restarts of all ranks"] if num_restarts and wanted != "rollback" else []
        if forming is None:
            problems.append("no membership followed")
        elif forming > max_forming_seconds:
            problems.append(f"forming the membership took {forming:.2f} s")
    if not answer["survives"]:
        problems += _judge_end(seen, strategies)
    return FaultRecord(
        fault=fault,
        seen=seen,
        healthy_lost=tuple(healthy),
        forming_seconds=forming,
        strategies=strategies,
        num_restarts=num_restarts,
        problems=tuple(problems),
    )


def _judge_end(seen: Event, strategies: Sequence[str]) -> list[str]:
    """Check the end of a job that was predicted not to survive a loss: it must have ended with the expected exit code,
    or all ranks must have restarted from the predicted state.

    If ``can_recover`` predicts that a user must start the job again, the job may also restart by itself.
    """
    if "problem" in seen:
        return []
    if "fell_to" in seen:
        others = sorted(set(strategies) - {seen["fell_to"]})
        return [f"the job continued with {', '.join(others)}"] if others else []
    found = [] if seen.get("ended") not in (None, 0, 130) else [f"the job ended with exit code {seen.get('ended')}"]
    return [*found, *(f"the job continued with {strategy}" for strategy in strategies)]


def _unreached(fault: Event, seen: Event) -> FaultRecord:
    problem = seen.get("problem", "an earlier fault ended the job")
    return FaultRecord(
        fault=fault,
        seen=seen,
        healthy_lost=(),
        forming_seconds=None,
        strategies=(),
        num_restarts=0,
        problems=(problem,),
    )


def _forming_seconds(seen: Event, events: Sequence[Event], orders: Sequence[Event]) -> float | None:
    """Compute ``FaultRecord.forming_seconds``. If the controller was hit too, the time begins with the first order of
    its successor."""
    victims = set(seen["lost"])
    noticed = {
        event["node"]: event["time_unix_seconds"]
        for event in reversed(events)  # the first event of each node remains
        if event["kind"] in ("node_lost", "rank_failed") and event.get("node") in victims
    }
    if not noticed:
        return None
    last = max(noticed.values())
    if "controller.log" in seen.get("processes", {}):
        last = max([last, *(order["time_unix_seconds"] for order in orders[:1])])
    begun = [e for e in events if e["kind"] in ("membership_changed", "ranks_ready") and e["time_unix_seconds"] > last]
    if not begun:
        return None
    replays = [
        event["seconds"]
        for event in events
        if event["kind"] == "stage_recovery" and event["generation"] == begun[0].get("generation")
    ]
    return float(begun[0]["time_unix_seconds"] - last - max(replays, default=0.0))


def _named(seen: Event) -> set[int]:
    """Return the nodes of all processes that a fault hit, even if a process was only stopped briefly. These nodes do
    not count as healthy."""
    numbers = (log.partition("-")[2].partition("-")[0].partition(".")[0] for log in seen.get("processes", {}))
    return {int(number) for number in numbers if number.isdigit()}


def _between(lines: Sequence[Event], since: float, until: float) -> list[Event]:
    return [line for line in lines if since <= line["time_unix_seconds"] < until]

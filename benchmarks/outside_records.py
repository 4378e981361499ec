"""Reads each fault from the files of a ``faults-from-outside`` job: lost processes, duration of forming."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.outside_driver import losses_since

MAX_FORMING_SECONDS = 3.0
_STRATEGIES = {"replicas": "replicas", "localized": "localized", "memory": "window", "persisted": "window"}
"""Names of ``can_recover`` to those of ``recovery_started``."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """Record of one fault, from outside and from the run's own files."""

    fault: Event
    """Fault as it was drawn."""
    seen: Event
    """Driver's record; empty where the fault was never reached."""
    healthy_lost: tuple[int, ...]
    """Nodes that were lost and that no fault had hit."""
    forming_seconds: float | None
    """Time from the detection of the burst's last fault to the membership that follows, without replayed iterations;
    None
    where no membership followed.
    """
    strategies: tuple[str, ...]
    """Strategies of the memberships that followed."""
    num_restarts: int
    problems: tuple[str, ...]

    @property
    def is_proven(self) -> bool:
        """Whether the kernel showed that it happened."""
        return bool(self.seen.get("proven"))

    @property
    def is_foretold(self) -> bool:
        """Whether ``can_recover`` had predicted that the job survives it."""
        return bool(self.seen.get("answer", {}).get("survives"))


def read_faults(
    faults: Sequence[Event],
    seen: Sequence[Event],
    events: Sequence[Event],
    orders: Sequence[Event],
    *,
    max_forming_seconds: float = MAX_FORMING_SECONDS,
) -> list[FaultRecord]:
    """A record for each fault of a job.

    Args:
        max_forming_seconds: forming that takes longer is a problem.
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
        wanted = _STRATEGIES.get(answer["rung"], answer["rung"])
        others = sorted(set(strategies) - {wanted})
        # After the loss nodes join; in jobs with replicas these memberships continue with replicas, too.
        problems += [f"continued with {', '.join(others)}, where {answer['rung']} was predicted"] if others else []
        problems += [f"{num_restarts} restarts of all ranks"] if num_restarts and wanted != "window" else []
        if forming is None:
            problems.append("no membership followed")
        elif forming > max_forming_seconds:
            problems.append(f"forming took {forming:.2f} s")
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
    """Check that an unrecoverable loss ends the job with an exit code of its own, or all start again from the
    predicted state.

    In some cases ``can_recover`` predicts that the job must be started again from outside, and the job then does it
    itself.
    """
    if "problem" in seen:
        return []
    if "fell_to" in seen:
        others = sorted(set(strategies) - {seen["fell_to"]})
        return [f"continued with {', '.join(others)}"] if others else []
    found = [] if seen.get("ended") not in (None, 0, 130) else [f"the job ended with exit code {seen.get('ended')}"]
    return [*found, *(f"continued with {strategy}" for strategy in strategies)]


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
    """Measure as ``FaultRecord.forming_seconds``; where the controller was hit, too, from the first order of the next
    one."""
    victims = set(seen["lost"])
    noticed = {
        event["node"]: event["time_unix_seconds"]
        for event in reversed(events)  # the first of each node stays
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
    """Nodes of the processes that a fault went to: what was stopped briefly is no healthy node either."""
    numbers = (log.partition("-")[2].partition("-")[0].partition(".")[0] for log in seen.get("processes", {}))
    return {int(number) for number in numbers if number.isdigit()}


def _between(lines: Sequence[Event], since: float, until: float) -> list[Event]:
    return [line for line in lines if since <= line["time_unix_seconds"] < until]

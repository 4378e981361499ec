"""Reads the records of a run with restarts, separated by generation."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.testing.jobs import JobResult


@dataclass(frozen=True, slots=True)
class Generation:
    """Records between two starts of all ranks."""

    events: Sequence[Mapping[str, Any]]
    hits: Sequence[Mapping[str, Any]]
    """Injected faults, as ranks recorded them before they happened."""
    losses: Sequence[tuple[int, float]]
    digests: Sequence[tuple[int, tuple[str, ...]]]
    """Digests of every rank's whole state in rank order, with the iteration after which they were taken."""

    def newest(self, kind: str) -> Mapping[str, Any] | None:
        """Return the newest event of a kind in this generation."""
        return next((event for event in reversed(self.events) if event["kind"] == kind), None)

    def differences(self, reference: "Generation") -> list[str]:
        """Return the differences from the undisturbed run, bit by bit."""
        found = []
        for name, mine, theirs in (
            ("state", self.digests, dict(reference.digests)),
            ("loss", self.losses, dict(reference.losses)),
        ):
            found += [f"{name} of iteration {at}: {value}" for at, value in mine if theirs.get(at) != value]
        return found


def generations_of(run: JobResult, starts: Sequence[float] | None = None) -> list[Generation]:
    """Return all generations of a run, oldest first.

    Args:
        starts: Unix times at which all generations except the first began. If None, the restarts that the run reported
            are used.
    """
    events = run.records()
    if starts is None:
        starts = [event["time_unix_seconds"] for event in events if event["kind"] == "ranks_restarted"]
    metrics = [m for m in run.records("metrics.jsonl") if "loss" in m]
    by_kind = [_split(records, starts) for records in (events, run.records("failpoints.jsonl"), metrics)]
    return [
        Generation(
            events=own,
            hits=hits,
            losses=[(m["iteration"], m["loss"]) for m in measured],
            digests=[(e["iteration"], tuple(e["digests"])) for e in own if e["kind"] == "state_digest"],
        )
        for own, hits, measured in zip(*by_kind, strict=True)
    ]


def missing(generations: Sequence[Generation], num_iterations: int) -> list[str]:
    """Return the iterations of a run that no generation recorded."""
    wanted = set(range(1, num_iterations + 1))
    losses = wanted - {at for generation in generations for at, _ in generation.losses}
    digests = wanted - {at for generation in generations for at, _ in generation.digests}
    return [
        f"{name} of iterations {sorted(absent)} never recorded"
        for name, absent in (("loss", losses), ("state", digests))
        if absent
    ]


def _split(records: Sequence[Mapping[str, Any]], starts: Sequence[float]) -> list[list[Mapping[str, Any]]]:
    parts: list[list[Mapping[str, Any]]] = [[] for _ in range(len(starts) + 1)]
    for record in records:
        parts[bisect_right(starts, record["time_unix_seconds"])].append(record)
    return parts

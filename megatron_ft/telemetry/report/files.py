"""What a page is made from: a run's records, as they lie in its folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron_ft.errors import DataError
from megatron_ft.events import Metrics, Record
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.strict_json import JsonValue, decode
from megatron_ft.telemetry.read import EVENTS_FILE, METRICS_FILE, read_lines, to_metrics
from megatron_ft.telemetry.report.placements import newest_plans

DECISIONS_FILE = "decisions.jsonl"
_LARGEST = 2**63 - 1

_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How the control plane had a job go on without nodes, with others, or not: a line of ``decisions.jsonl``."""

    generation: int
    """The membership that ended."""
    time_unix_seconds: float
    """When it was decided, by the wall clock of the controller."""
    reason: str
    """Why it ended."""
    lost_nodes: tuple[int, ...] = ()
    """Nodes that were left behind."""
    left_nodes: tuple[int, ...] = ()
    """Nodes that left as asked."""
    joined_nodes: tuple[int, ...] = ()
    """Nodes that came."""
    declined: str | None = None
    """Why the ranks could not go on in their processes; None where they could."""
    previous_ranks: tuple[int | None, ...] = ()
    """For each rank of the next membership the rank it was before; None for a new process. Empty where declined."""
    nodes: tuple[int, ...] = ()
    """For each rank of the next membership its node. Empty where declined."""

    @classmethod
    def of(cls, line: Mapping[str, JsonValue]) -> "Decision":
        """Read a line; what a page does not tell (positions, votes, addresses) is passed over.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        found = {name: _field(line, name, hint) for name, hint in _REQUIRED.items()}
        found |= {name: _field(line, name, hint) for name, hint in _OPTIONAL.items() if name in line}
        following = _field(line, "next", Mapping) if "next" in line else None
        if following is not None:
            found["nodes"] = _field(following, "nodes", tuple[int, ...])
            found["previous_ranks"] = tuple(
                decode(int | None, rank, "decision.next.previous_ranks")
                for rank in _field(following, "previous_ranks", list)
            )
        return cls(**found)


_REQUIRED = {"generation": int, "time_unix_seconds": float, "reason": str}
_NODES = tuple[int, ...]
_OPTIONAL = {"lost_nodes": _NODES, "left_nodes": _NODES, "joined_nodes": _NODES, "declined": str}


def _field(values: Mapping[str, JsonValue], name: str, hint: object) -> JsonValue:
    if name not in values:
        raise ValueError(f"decision.{name}: is required")
    value = values[name]
    if hint in (Mapping, list):
        kind = dict if hint is Mapping else list
        if not isinstance(value, kind):
            raise ValueError(f"decision.{name}={value!r}: must be {kind.__name__}")
        return value
    return decode(hint, value, f"decision.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """All records of a run, each kind in the order it was written."""

    folder: str
    """Name of the run's folder."""
    events: tuple[Record, ...] = ()
    metrics: tuple[Metrics, ...] = ()
    """Of all attempts: iterations that were run again are there again."""
    decisions: tuple[Decision, ...] = ()
    plans: tuple[PlacementPlan, ...] = ()
    """Of each pipeline stage, the placement that was in force last."""


def read_run(run_dir: Path) -> RunFiles:
    """Read a run's folder; the run may still be going on.

    Raises:
        DataError: no such run, or a line other than an unfinished last one is damaged; names file and line.
    """
    try:
        events = read_lines(run_dir / EVENTS_FILE, bounded(Record.from_record))
        metrics = read_lines(run_dir / METRICS_FILE, bounded(to_metrics))
        path = run_dir / DECISIONS_FILE
        decisions = read_lines(path, bounded(Decision.of)) if path.exists() else ()
        said = tuple(events)
        return RunFiles(
            folder=run_dir.resolve().name,
            events=said,
            metrics=tuple(metrics),
            decisions=tuple(decisions),
            plans=newest_plans(run_dir, said),
        )
    except (OSError, ValueError) as error:
        raise DataError(f"run_dir={run_dir}: must be a run with metrics.jsonl and events.jsonl: {error}") from None


def bounded(parse: Callable[[dict[str, JsonValue]], _Parsed]) -> Callable[[dict[str, JsonValue]], _Parsed]:
    """``parse``, with a ValueError for integers that need more than 64 bits: nothing counts so far."""

    def checked(values: dict[str, JsonValue]) -> _Parsed:
        for name, value in values.items():
            if type(value) is int and abs(value) > _LARGEST:
                raise ValueError(f"{name}: must fit 64 bits")
        return parse(values)

    return checked

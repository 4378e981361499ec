"""Reads the folder of a run: records, decisions of the controller, and the current placement of experts."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from megatron_ft.errors import ConfigError, DataError
from megatron_ft.events import Metrics, PlacementInForce, Record
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.serde import JsonValue, decode, parse_json
from megatron_ft.telemetry.read import EVENTS_FILE, METRICS_FILE, read_lines, to_metrics

DECISIONS_FILE = "decisions.jsonl"
PLACEMENTS_FOLDER = "placements"
MAX_PLAN_BYTES = 64 * 2**20
"""Largest accepted size of a placement file in bytes. The files of real runs are smaller."""
MAX_EXPERTS = 2**16
POLL_SECONDS = 0.5
"""Time in seconds between two checks of whether the run's files have grown."""
MAX_SHARE = 0.1
"""Largest share of wall time that may be spent on writing report pages while a run is followed."""
_LARGEST = 2**63 - 1

_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Line of ``decisions.jsonl``: a decision of the controller after a loss, or a request that nodes join or leave."""

    generation: int
    """Generation of the membership that this decision ended."""
    time_unix_seconds: float
    """Time of the decision by the controller's clock."""
    reason: str
    """Reason why this decision ended a membership."""
    lost_nodes: tuple[int, ...] = ()
    """Nodes that were lost."""
    left_nodes: tuple[int, ...] = ()
    """Nodes that left on request."""
    joined_nodes: tuple[int, ...] = ()
    declined: str | None = None
    """Reason why the surviving ranks had to restart as new processes; None if their processes continue."""
    previous_ranks: tuple[int | None, ...] = ()
    """Previous rank of each rank of the next membership; None if it has no state. Empty if ``declined`` is set."""
    nodes: tuple[int, ...] = ()
    """Node of each rank of the next membership. Empty if ``declined`` is set."""

    @classmethod
    def of(cls, line: Mapping[str, JsonValue]) -> "Decision":
        """Parse a decision from a line of ``decisions.jsonl``. Fields that the report page does not show (positions,
        votes, addresses) are ignored.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        hints, of_next = get_type_hints(cls), ("previous_ranks", "nodes")
        required = ["generation", "time_unix_seconds", "reason"]
        values = {name: line[name] for name in hints if name in line and name not in of_next}
        following = line.get("next")
        if isinstance(following, dict):
            required += of_next
            values |= {name: following[name] for name in of_next if name in following}
        elif following is not None:
            raise ValueError(f"decision.next={following!r}: must be an object")
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"decision.{missing[0]}: is required")
        return cls(**{name: decode(hints[name], value, f"decision.{name}") for name, value in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Contents of a run's folder: events, metrics and decisions, each in the order of writing, and placements."""

    folder: str
    events: tuple[Record, ...] = ()
    metrics: tuple[Metrics, ...] = ()
    """All metrics records. An iteration that ran several times has several records."""
    decisions: tuple[Decision, ...] = ()
    plans: tuple[PlacementPlan, ...] = ()
    """Newest placement of experts on ranks, for each pipeline stage; empty if the run's folder contains none."""

    @classmethod
    def read(cls, run_dir: Path) -> "RunFiles":
        """Read the folder of a run, which may still be running.

        Raises:
            DataError: there is no such run, or a line is damaged; the message names file and line. An unfinished last
                line is no error.
        """
        try:
            events = tuple(read_lines(run_dir / EVENTS_FILE, _bounded(Record.read)))
            metrics = tuple(read_lines(run_dir / METRICS_FILE, _bounded(to_metrics)))
            path = run_dir / DECISIONS_FILE
            return cls(
                folder=run_dir.resolve().name,
                events=events,
                metrics=metrics,
                decisions=tuple(read_lines(path, _bounded(Decision.of))) if path.exists() else (),
                plans=_newest_plans(run_dir, events),
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"run_dir={run_dir}: must be the folder of a run with intact files metrics.jsonl and events.jsonl: "
                f"{error}"
            ) from None


def _bounded(parse: Callable[[dict[str, JsonValue]], _Parsed]) -> Callable[[dict[str, JsonValue]], _Parsed]:
    # No number of a run needs more than 64 bits, and arithmetic with larger numbers could take unbounded time.
    def checked(values: dict[str, JsonValue]) -> _Parsed:
        for name, value in values.items():
            if type(value) is int and abs(value) > _LARGEST:
                raise ValueError(f"{name}: must be an integer of at most 64 bits")
        return parse(values)

    return checked


def _newest_plans(run_dir: Path, records: Sequence[Record]) -> tuple[PlacementPlan, ...]:
    newest = next((record for record in reversed(records) if isinstance(record, PlacementInForce)), None)
    path = None if newest is None else run_dir / PLACEMENTS_FOLDER / f"iter_{newest.iteration:07d}.json"
    if path is None or not path.is_file():
        return ()
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise ValueError(f"the file must have at most {MAX_PLAN_BYTES} bytes")
        content = parse_json(path.read_bytes())
        stages = content.get("stages") if isinstance(content, dict) else None
        if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
            raise ValueError("stages: must contain one placement per pipeline stage")
        return tuple(map(_plan, stages))
    except (ValueError, ConfigError) as error:
        raise ValueError(f"{path}: {error}") from None


def _plan(stage: dict[str, Any]) -> PlacementPlan:
    names = [field.name for field in fields(PlacementPlan)]
    if missing := [name for name in names if name not in stage]:
        raise ValueError(f"stages.{missing[0]}: is required")
    hints = get_type_hints(PlacementPlan)
    plan = PlacementPlan(**{name: decode(hints[name], stage[name], f"stages.{name}") for name in names})
    # ``validate`` makes a set with ``num_experts`` entries, so the bound is checked first.
    if not 0 < plan.num_experts <= MAX_EXPERTS:
        raise ValueError(f"stages.num_experts={plan.num_experts}: must be 1 to {MAX_EXPERTS}")
    plan.validate()
    return plan


def follow(
    run_dir: Path,
    write: Callable[[], bool],
    *,
    every_seconds: float,
    patience_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Write the report page at once, and again whenever the run's files have grown. Stop when the run ends, or after
    ``patience_seconds`` without a new record. Return whether the run has ended.

    Args:
        write: Writes the page and returns whether the run has ended.
        every_seconds: Shortest time between two calls of ``write``.
        patience_seconds: Time without a new record after which the function stops and returns False.
    """
    while True:
        # Sizes are read before the page is written, so that records appended meanwhile cause another page.
        seen, began = _sizes(run_dir), clock()
        if write():
            return True
        # Writing the page of a long run takes long. The pause limits writing to ``MAX_SHARE`` of the time.
        due = clock() + max(every_seconds, (clock() - began) * (1 / MAX_SHARE - 1))
        until = max(due, clock() + patience_seconds)
        while clock() < due or _sizes(run_dir) == seen:
            if clock() >= until:
                return False
            wait(POLL_SECONDS)


def _sizes(run_dir: Path) -> tuple[int, ...]:
    """Return the sizes in bytes of the files that grow during a run. The size of a missing file is 0."""

    def size(path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return 0

    return tuple(size(run_dir / name) for name in (EVENTS_FILE, METRICS_FILE))

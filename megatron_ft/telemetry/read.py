"""Reading back what a run has reported."""

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_ft.events import Metrics, Record

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"


def read_metrics(run_dir: Path) -> list[Metrics]:
    """The newest metrics of each iteration, in the order of iterations.

    After a resume from iteration k the older attempt's records of later iterations stay in the file;
    here each gives way to its successor.

    Raises:
        FileNotFoundError: the run has no ``metrics.jsonl``.
        ValueError: a line other than an unfinished last one is damaged; names file and line.
    """
    newest: dict[int, Metrics] = {}
    for record in _records(run_dir / METRICS_FILE):
        assert isinstance(record, Metrics), f"{METRICS_FILE} holds metrics only, found {record.kind}"
        newest[record.iteration] = record
    return [newest[iteration] for iteration in sorted(newest)]


def first_metrics(run_dir: Path) -> Metrics | None:
    """The first metrics the run ever reported; ``None`` if there are none yet.

    Raises:
        ValueError: the line is damaged.
    """
    first = next(_records(run_dir / METRICS_FILE), None)
    assert first is None or isinstance(first, Metrics), f"{METRICS_FILE} holds metrics only"
    return first


def read_events(run_dir: Path) -> list[Record]:
    """All events of all attempts, in the order they were written.

    Raises:
        FileNotFoundError: the run has no ``events.jsonl``.
        ValueError: a line other than an unfinished last one is damaged; names file and line.
    """
    return list(_records(run_dir / EVENTS_FILE))


def _records(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return  # being written, or torn by a crash
            try:
                yield Record.from_record(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error

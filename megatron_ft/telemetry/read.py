"""Reads the records of a run from its files."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from megatron_ft.events import Metrics, Record
from megatron_ft.serde import JsonValue, parse_json

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"

_Parsed = TypeVar("_Parsed")


def read_metrics(run_dir: Path) -> list[Metrics]:
    """Return the newest metrics of each iteration from ``metrics.jsonl``, in the order of iterations.

    An iteration that ran again after a recovery or a resume has several records in the file. This function returns
    only the newest of them.

    Raises:
        FileNotFoundError: the run has no ``metrics.jsonl``.
        ValueError: a line is damaged; the message names file and line. An unfinished last line is no error.
    """
    return newest_of_each(read_lines(run_dir / METRICS_FILE, to_metrics))


def newest_of_each(metrics: Iterable[Metrics]) -> list[Metrics]:
    """Return the newest metrics of each iteration, in the order of iterations. ``metrics`` must be in the order of
    writing, and may contain an iteration several times."""
    # Lines are only appended, so the last line of an iteration is that of the newest attempt.
    newest = {record.iteration: record for record in metrics}
    return [newest[iteration] for iteration in sorted(newest)]


def first_metrics(run_dir: Path) -> Metrics | None:
    """Return the first metrics of the run, or None if the run has not reported any metrics.

    Raises:
        ValueError: the first line of ``metrics.jsonl`` is damaged.
    """
    return next(read_lines(run_dir / METRICS_FILE, to_metrics), None)


def read_events(run_dir: Path) -> list[Record]:
    """Return the events of all jobs of a run, in the order of writing. An event of a kind that another package defines
    is an ``OtherRecord``.

    Raises:
        FileNotFoundError: the run has no ``events.jsonl``.
        ValueError: a line is damaged; the message names file and line. An unfinished last line is no error.
    """
    return list(read_lines(run_dir / EVENTS_FILE, Record.read))


def read_lines(
    path: Path, parse: Callable[[dict[str, JsonValue]], _Parsed], *, num_bytes: int | None = None
) -> Iterator[_Parsed]:
    """Parse the JSON object of each line, in order. Skip an unfinished last line.

    Args:
        num_bytes: Number of bytes to read, for a file that may grow meanwhile; None to read all.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON object, or ``parse`` raised a ValueError; the message names file and line.
    """
    num_read = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            num_read += len(line)
            if not line.endswith(b"\n") or (num_bytes is not None and num_read > num_bytes):
                return  # the line is still being written, or a crash cut it off
            try:
                yield parse(_object(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error


def to_metrics(values: dict[str, JsonValue]) -> Metrics:
    """Convert a line of ``metrics.jsonl`` to a record. Raise a ValueError for a record of another kind."""
    metrics = Metrics.from_record(values)
    assert isinstance(metrics, Metrics), "from_record returns only records of its own kind"
    return metrics


def _object(line: bytes) -> dict[str, JsonValue]:
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__}: must be a JSON object")
    return value

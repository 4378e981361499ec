"""Defines a sink as another package would. It counts records, and reports an event of another package."""

from pathlib import Path

from megatron_ft.events import Metrics, Record
from megatron_ft.telemetry.sinks.base import Outcome, Sink, SinkContext


class CountingSink(Sink):
    """Writes the number of its records to a file at the end."""

    name = "counting"

    def __init__(self, path: Path) -> None:
        self.path, self.count, self.num_iterations = path, 0, 0

    @classmethod
    def open(cls, context: SinkContext, *, file: str) -> "CountingSink":
        """See ``Sink``."""
        return cls(context.run_dir / file)

    def write(self, record: Record) -> None:
        """See ``Sink``."""
        self.count += 1
        self.num_iterations += isinstance(record, Metrics)

    def take_reports(self) -> list[Record]:
        """See ``Sink``."""
        from tests.helpers.coffee_event import CoffeeFinished  # adds a kind of record to the process that imports it

        cups, self.num_iterations = self.num_iterations, 0
        return [CoffeeFinished(cups=cups)] if cups else []

    def close(self, outcome: Outcome) -> None:
        """See ``Sink``."""
        self.path.write_text(f"{self.count} records, exit code {outcome.exit_code}")

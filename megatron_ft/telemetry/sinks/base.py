"""Base class of sinks, and the context that opens them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megatron_ft.config.job import JobConfig
from megatron_ft.events import Record
from megatron_ft.telemetry.state import RunState

Clock = Callable[[], float]
"""Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run: exit code, reason and time."""

    exit_code: int
    """Exit code, see ``errors.EXIT_CODES``."""
    reason: str
    time_unix_seconds: float
    """Wall-clock time of the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """Job that a sink is opened for."""

    config: JobConfig
    run_dir: Path
    """Folder of the run, which exists."""
    world_size: int
    clock: Clock
    stream: TextIO | None
    """Stream of the terminal sink; None for standard output."""
    first_loss: float | None
    """Loss of the run's first iteration, if an earlier attempt reported it."""

    def state(self) -> RunState:
        """Return the state of a run that has reported nothing yet. Each sink adds records to its own copy."""
        train_iterations = self.config.training.train_iterations
        return RunState(time_opened_seconds=self.clock(), train_iterations=train_iterations, first_loss=self.first_loss)


class Sink:
    """Destination of records. Only one thread calls it at a time.

    An entry ``telemetry.sinks.<name>`` names a subclass by ``_target_``. The other keys of the entry are arguments of
    ``open``.
    """

    name: str
    """Name of the sink in events and messages."""
    retries: bool = True
    """Whether ``write`` may succeed after a failed call. If False, only ``close`` is called after the first failure."""
    num_lost_records: int = 0
    """Number of records that the sink accepted and later dropped."""

    @classmethod
    def open(cls, context: SinkContext) -> "Sink | None":
        """Open the sink for a job; None if the configuration of the job turns the sink off.

        Raises:
            OSError: a file cannot be opened.
        """
        raise NotImplementedError

    def write(self, record: Record) -> None:
        """Take one record with its time. Records of other kinds are ignored.

        May raise anything. Returns in well under a millisecond, whatever disk and network do.
        """
        raise NotImplementedError

    def take_reports(self) -> list[Record]:
        """Return the records that the sink itself has created since the last call. They go to all sinks."""
        return []

    def close(self, outcome: Outcome) -> None:
        """Write everything accepted to its destination. Called once; takes a bounded time."""

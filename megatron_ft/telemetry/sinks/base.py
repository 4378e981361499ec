"""Base class of sinks, and the context that opens them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megatron_ft.config.job import JobConfig
from megatron_ft.events import Record
from megatron_ft.telemetry.state import RunState

Clock = Callable[[], float]
"""Function that returns the current time in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run: exit code, reason and time."""

    exit_code: int
    """Exit code; ``errors.EXIT_CODES`` lists the values."""
    reason: str
    time_unix_seconds: float
    """Time at which the run ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """Information about a job that its sinks may need."""

    config: JobConfig
    run_dir: Path
    """Folder of the run, which exists."""
    world_size: int
    clock: Clock
    stream: TextIO | None
    """Stream to which the terminal sink writes; None for standard output."""
    first_loss: float | None
    """Loss of the run's first iteration if an earlier job of the run reported it; None otherwise."""

    def state(self) -> RunState:
        """Return a new ``RunState`` without records. The sink adds the run's records to it."""
        train_iterations = self.config.training.train_iterations
        return RunState(time_opened_seconds=self.clock(), train_iterations=train_iterations, first_loss=self.first_loss)


class Sink:
    """Destination of records. Only one thread calls it at a time.

    The configuration key ``telemetry.sinks.<name>._target_`` names a subclass. The other keys of the entry are
    arguments of ``open``.
    """

    name: str
    """Name of the sink in events and messages."""
    needs: tuple[str, ...] = ()
    """Optional packages that the sink imports. A job does not start if one of them is not installed."""
    retries: bool = True
    """Whether ``write`` may succeed again after a failed call. If False, the only call after a failure is ``close``."""
    num_lost_records: int = 0
    """Number of records that the sink accepted but dropped before they were written."""

    @classmethod
    def open(cls, context: SinkContext) -> "Sink | None":
        """Open the sink for a job, or return None if the job's configuration turns the sink off. Raises OSError if a
        file cannot be opened."""
        raise NotImplementedError

    def write(self, record: Record) -> None:
        """Accept one record, whose time is already set. Ignore the kinds of records that the sink does not need.

        May raise any exception. Must return in well under a millisecond, even if the disk or the network is slow.
        """
        raise NotImplementedError

    def take_reports(self) -> list[Record]:
        """Return the records that this sink has created since the last call. The caller writes them to all sinks."""
        return []

    def close(self, outcome: Outcome) -> None:
        """Write all accepted records to their destination. Called only once; must end in a bounded time."""

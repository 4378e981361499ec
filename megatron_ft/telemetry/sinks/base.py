"""Base of all sinks, and the context that a sink is opened with."""

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
    """The end of a run."""

    exit_code: int
    """See ``errors.EXIT_CODES``."""
    reason: str
    """One sentence."""
    time_unix_seconds: float
    """Wall-clock time of the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """The job that a sink is opened for."""

    config: JobConfig
    run_dir: Path
    """Folder of the run; it exists."""
    world_size: int
    clock: Clock
    stream: TextIO | None
    """Stream of the terminal; None for standard output."""
    first_loss: float | None
    """Loss of the run's first iteration, where an earlier attempt has reported it."""

    def state(self) -> RunState:
        """The figures of a run that has reported nothing yet; each sink folds records into its own."""
        train_iterations = self.config.training.train_iterations
        return RunState(time_opened_seconds=self.clock(), train_iterations=train_iterations, first_loss=self.first_loss)


class Sink:
    """A place records go to. One thread at a time calls it.

    ``telemetry.sinks.<name>`` names a subclass by ``_target_``; its other entries are arguments of ``open``.
    """

    name: str
    """Its name in events and messages."""
    retries: bool = True
    """Whether a later ``write`` may succeed after one that raised. Otherwise nothing more is written after the first
    failure, and only ``close`` is called."""
    num_lost_records: int = 0
    """Records accepted and later given up."""

    @classmethod
    def open(cls, context: SinkContext) -> "Sink | None":
        """The sink of a job; None where the job's configuration switches it off.

        Raises:
            OSError: a file cannot be opened.
        """
        raise NotImplementedError

    def write(self, record: Record) -> None:
        """Take one record with its time; kinds that do not concern the sink are ignored.

        May raise anything. Returns in well under a millisecond, whatever disk and network do.
        """
        raise NotImplementedError

    def take_reports(self) -> list[Record]:
        """Records that the sink itself reports since the last call; all sinks are given them."""
        return []

    def close(self, outcome: Outcome) -> None:
        """Put everything accepted in its place. Called once; takes a bounded time."""

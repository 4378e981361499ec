"""What a sink is."""

from dataclasses import dataclass
from typing import Protocol

from megatron_ft.events import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    """See ``errors.EXIT_CODES``."""
    reason: str
    """In words."""
    time_unix_seconds: float
    """When, by the wall clock."""


class Sink(Protocol):
    """A place records go to. One thread at a time calls it."""

    name: str
    """What reports call it."""
    retries: bool
    """Whether a later ``write`` may succeed after one that raised. A sink that does not retry is left
    alone after its first failure, but for ``close``."""

    def write(self, record: Record) -> None:
        """Take one time-stamped record; kinds that do not concern the sink are ignored.

        May raise anything. Returns in well under a millisecond, whatever disk and network do.
        """

    def close(self, outcome: Outcome) -> None:
        """Everything taken is in its place when this returns. Called once; bounded in time."""

    @property
    def num_lost_records(self) -> int:
        """Records taken but given up so far."""

"""The end of a job, as the controller sends it to the launcher."""

from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ft.control.membership.state import Failure, Outcome, State, first_of
from megatron_ft.framing import Message
from megatron_ft.serde import decode, encode

_NOT_KEPT = ("op", "rank", "start", "generation", "position", "planned")
_LONG = ("traceback", "log_tail")
# The result travels in one frame (``framing.MAX_FRAME_BYTES``), which tracebacks of thousands of ranks exceed.
_SHORT_LENGTH = 500
_OF_FIRST_ERROR = ("error", "traceback", "exit_code")


@dataclass
class JobResult:
    """End of the job, or of a generation of it, with all information on every rank that failed."""

    outcome: Outcome
    reason: str
    first_failure: Failure | None
    details: dict[int, Message] = field(default_factory=dict)
    """Details of the ends of ranks, by their number at the start: ``number`` (in the membership), ``node, returncode,
    at_seconds, traceback, error, exit_code, iteration, phase, log, log_tail``, as far as known."""
    survived: tuple[str, ...] = ()
    """Reason for the end of each earlier generation."""
    num_reforms: int = 0
    """Number of earlier generations after which ranks continued in their processes."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON; long texts are left out if thousands of ranks have failed."""
        details = {rank: self._shortened(rank, about) for rank, about in self.details.items()}
        content: dict[str, Any] = encode(replace(self, details=details))
        return content

    def _shortened(self, rank: int, about: Message) -> Message:
        if self.first_failure is not None and self.first_failure.rank == rank:
            return about
        short = {name: value for name, value in about.items() if name not in _LONG}
        return {name: value[:_SHORT_LENGTH] if isinstance(value, str) else value for name, value in short.items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "JobResult":
        """Inverse of ``to_json``."""
        details = {int(rank): about for rank, about in content["details"].items()}
        found: JobResult = decode(cls, {**content, "details": {}})
        return replace(found, details=details)


def add_failure_report(about: Message, report: Message, *, caused_by_us: bool) -> None:
    """Add the report of a rank's end to ``about``, the rank's entry of ``JobResult.details``.

    Only the first error counts: a rank that cannot survive raises a second one.
    """
    if "error" in about:
        report = {name: value for name, value in report.items() if name not in _OF_FIRST_ERROR}
    # An exception comes before the exit it causes. The earlier time orders ranks.
    failed_at_seconds = min(report["at_seconds"], about.get("at_seconds", report["at_seconds"]))
    about.update({name: value for name, value in report.items() if name not in _NOT_KEPT})
    about["at_seconds"] = failed_at_seconds
    about["caused_by_us"] = about.get("caused_by_us", caused_by_us)


def result_of(state: State, reason: str, details: dict[int, Message]) -> JobResult:
    """Make the result of a job that has ended in ``state``."""
    firsts = [first_of(failures) for failures in state.survived]
    survived = tuple("nodes joined or left on request" if first is None else first.detail for first in firsts)
    return JobResult(state.outcome, reason, state.first_failure, details, survived, state.num_reforms)

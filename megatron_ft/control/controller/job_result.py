"""How a job ended, as it travels from the controller to the console."""

from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_ft.control.membership.state import Failure, Outcome, State, first_of
from megatron_ft.framing import Message

_NOT_NOTED = ("op", "rank", "generation", "position")
_LONG = ("traceback", "log_tail")
_SHORT_LENGTH = 500
_FIRST_WORDS = ("error", "traceback", "exit_code")


@dataclass
class JobEnd:
    """How the job, or a generation of it, ended, and what is known of every rank that did not end well."""

    outcome: Outcome
    reason: str
    first_failure: Failure | None
    details: dict[int, Message] = field(default_factory=dict)
    """Rank, by its number at the start, to what was said of its end: ``number`` (in its membership), ``node,
    returncode, at_seconds, traceback, error, exit_code, iteration, phase, log, log_tail``, as far as known."""
    survived: tuple[str, ...] = ()
    """Why each earlier generation ended."""
    num_reforms: int = 0
    """Those of them after which ranks went on in their processes."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "outcome": self.outcome.value,
            "reason": self.reason,
            "first_failure": None if self.first_failure is None else asdict(self.first_failure),
            "details": {str(rank): self._in_short(rank, about) for rank, about in self.details.items()},
            "survived": list(self.survived),
            "num_reforms": self.num_reforms,
        }

    def _in_short(self, rank: int, about: Message) -> Message:
        """Whole of the rank that failed first; of the others without what fills a message when there are thousands."""
        if self.first_failure is not None and self.first_failure.rank == rank:
            return about
        short = {name: value for name, value in about.items() if name not in _LONG}
        return {name: value[:_SHORT_LENGTH] if isinstance(value, str) else value for name, value in short.items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "JobEnd":
        """Inverse of ``to_json``."""
        first = content["first_failure"]
        return cls(
            outcome=Outcome(content["outcome"]),
            reason=content["reason"],
            first_failure=None if first is None else Failure(**first),
            details={int(rank): about for rank, about in content["details"].items()},
            survived=tuple(content["survived"]),
            num_reforms=content["num_reforms"],
        )


def add_words(about: Message, item: Message, *, caused_by_us: bool) -> None:
    """Add to ``about``, one rank's entry of ``JobEnd.details``, what ``item`` says of its end.

    The first error counts: a rank that could not survive raises another.
    """
    if "error" in about:
        item = {name: value for name, value in item.items() if name not in _FIRST_WORDS}
    failed_at_seconds = min(item["at_seconds"], about.get("at_seconds", item["at_seconds"]))
    about.update({name: value for name, value in item.items() if name not in _NOT_NOTED})
    about["at_seconds"] = failed_at_seconds
    about["caused_by_us"] = about.get("caused_by_us", caused_by_us)


def end_of(state: State, reason: str, details: dict[int, Message]) -> JobEnd:
    """The end of a job that stands at ``state``."""
    firsts = [first_of(failures) for failures in state.survived]
    survived = tuple("nodes joined or left as asked" if first is None else first.detail for first in firsts)
    return JobEnd(state.outcome, reason, state.first_failure, details, survived, state.num_reforms)

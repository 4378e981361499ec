"""Where a job continues after deaths: at the newest iteration whose vote anybody has settled.

A vote is settled when every rank has contributed, so whoever survives has then kept its reduced gradients and can
finish the iteration with the vote's values. Where nobody has settled it, everybody goes back to before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.planning.commit import Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a rank is when its membership ends. Its state is whole: that after ``completed``."""

    rank: int
    """In the membership that ends."""
    generation: int
    completed: int
    """Newest iteration whose decision this rank has carried out; 0 before the first."""
    contributed: int
    """Newest iteration to whose vote it has given its ballot, and whose gradients it keeps: ``completed``, or the one
    after it."""
    vote: Vote | None
    """The newest that is settled here: of ``completed`` or of the one after it; None before the first."""
    has_state: bool = True
    """False on a rank that was to be given its state in the membership that ends, and was not."""

    def validate(self) -> None:
        """Assert what a rank can be like.

        Raises:
            RecoveryError: no rank can be there.
        """
        settled = 0 if self.vote is None else self.vote.iteration
        in_order = self.completed <= self.contributed <= self.completed + 1 and settled <= self.contributed
        if not in_order or (self.vote is not None and settled < self.completed):
            raise RecoveryError(
                f"rank {self.rank}: completed {self.completed}, contributed to {self.contributed}, settled {settled}"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        content = {name: getattr(self, name) for name in self.__slots__}
        return {**content, "vote": None if self.vote is None else self.vote.to_record()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Position":
        """Inverse of ``to_json``."""
        vote = content["vote"]
        return cls(**{**content, "vote": None if vote is None else Vote.from_record(vote)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The iteration whose state every survivor has next."""

    iteration: int
    vote: Vote | None
    """What survivors that have not completed ``iteration`` finish it with; None where all have."""

    def validate(self) -> None:
        """Assert that the vote is of the iteration."""
        assert self.vote is None or self.vote.iteration == self.iteration, "the vote of another iteration"

    def summary(self) -> str:
        """One log line."""
        how = "everybody has completed it" if self.vote is None else "its vote was settled"
        return f"continue after iteration {self.iteration}: {how}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"iteration": self.iteration, "vote": None if self.vote is None else self.vote.to_record()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Target":
        """Inverse of ``to_json``."""
        vote = content["vote"]
        return cls(iteration=content["iteration"], vote=None if vote is None else Vote.from_record(vote))


def choose_target(positions: Sequence[Position]) -> Target:
    """The target of the survivors of one generation, a pure function of what they say.

    Raises:
        RecoveryError: nobody survives, or nobody who has state; or what they say cannot be: another protocol than this
            one was at work.
    """
    if not positions:
        raise RecoveryError("nobody survives")
    if not any(position.has_state for position in positions):
        raise RecoveryError("no rank that is left has state: all that had any are lost")
    for position in positions:
        position.validate()
    _check_alike("generation", [position.generation for position in positions])
    settled = {position.vote.iteration: position.vote for position in positions if position.vote is not None}
    target = max([position.completed for position in positions] + list(settled))
    for position in positions:
        if position.completed < target and position.contributed != target:
            raise RecoveryError(
                f"rank {position.rank} is at iteration {position.completed} and has no gradients of {target}, "
                "whose vote is settled elsewhere"
            )
    votes = [p.vote for p in positions if p.vote is not None and p.vote.iteration == target]
    _check_alike("vote", [repr(vote) for vote in votes])
    if all(position.completed == target for position in positions):
        return Target(iteration=target, vote=None)
    return Target(iteration=target, vote=votes[0])


def _check_alike(name: str, values: Sequence[object]) -> None:
    if any(value != values[0] for value in values):
        raise RecoveryError(f"survivors disagree about the {name}: {sorted(set(map(str, values)))}")

"""Iteration after which a job continues when ranks are lost: the newest one that any survivor knows to have a complete
vote.

A vote is complete only after every rank has contributed. So every survivor has kept its reduced gradients and can
finish the iteration with the values of the vote. If no survivor has the complete vote, all return to the state before
the iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.planning.commit import Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Progress of a rank at the end of a membership; it has the complete state after ``completed``."""

    rank: int
    """Rank in the membership that ends."""
    generation: int
    completed: int
    """Newest iteration that this rank has committed or skipped; 0 before the first."""
    contributed: int
    """Newest iteration to whose vote this rank has contributed, and whose gradients it keeps: ``completed`` or the next
    one."""
    vote: Vote | None
    """Newest complete vote, of ``completed`` or the next iteration; None before the first."""
    has_state: bool = True
    """False on a joining rank that did not receive its state in the membership that ends."""

    def validate(self) -> None:
        """Check that the fields are consistent.

        Raises:
            RecoveryError: they are not.
        """
        settled = 0 if self.vote is None else self.vote.iteration
        in_order = self.completed <= self.contributed <= self.completed + 1 and settled <= self.contributed
        if not in_order or (self.vote is not None and settled < self.completed):
            raise RecoveryError(
                f"rank {self.rank} reports an impossible position: completed iteration {self.completed}, "
                f"contributed to {self.contributed}, vote complete for {settled}"
            )

    def to_json(self) -> dict[str, Any]:
        content = {name: getattr(self, name) for name in self.__slots__}
        return {**content, "vote": None if self.vote is None else self.vote.to_record()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Position":
        vote = content["vote"]
        return cls(**{**content, "vote": None if vote is None else Vote.from_record(vote)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Iteration from whose state every survivor continues."""

    iteration: int
    vote: Vote | None
    """Vote with which survivors finish ``iteration``; None if all have completed it."""

    def validate(self) -> None:
        """Assert that the vote is of the iteration."""
        assert self.vote is None or self.vote.iteration == self.iteration, "the vote is of another iteration"

    def summary(self) -> str:
        how = "all ranks completed it" if self.vote is None else "its vote was complete"
        return f"continue after iteration {self.iteration}: {how}"

    def to_json(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "vote": None if self.vote is None else self.vote.to_record()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Target":
        vote = content["vote"]
        return cls(iteration=content["iteration"], vote=None if vote is None else Vote.from_record(vote))


def choose_target(positions: Sequence[Position]) -> Target:
    """Choose the target of the survivors of one generation, a pure function of their positions.

    Raises:
        RecoveryError: no rank with state survives, or positions contradict each other.
    """
    if not positions:
        raise RecoveryError("no rank survives")
    if not any(position.has_state for position in positions):
        raise RecoveryError("no surviving rank has state: all ranks with state are lost")
    for position in positions:
        position.validate()
    _check_alike("generation", [position.generation for position in positions])
    # A settled vote proves that every rank had contributed, lost ones included: no rank can be further than one
    # iteration behind it, and each has kept what it needs to finish.
    settled = {position.vote.iteration: position.vote for position in positions if position.vote is not None}
    target = max([position.completed for position in positions] + list(settled))
    for position in positions:
        # Positions that contradict this come from different histories: continuing would mix them.
        if position.completed < target and position.contributed != target:
            raise RecoveryError(
                f"rank {position.rank} has completed iteration {position.completed} and has no gradients of "
                f"iteration {target}, but another rank has the complete vote of {target}"
            )
    votes = [p.vote for p in positions if p.vote is not None and p.vote.iteration == target]
    # As text, which is exact for floats and equal for NaN.
    _check_alike("vote", [repr(vote) for vote in votes])
    if all(position.completed == target for position in positions):
        return Target(iteration=target, vote=None)
    return Target(iteration=target, vote=votes[0])


def _check_alike(name: str, values: Sequence[object]) -> None:
    if any(value != values[0] for value in values):
        raise RecoveryError(f"surviving ranks have different values of the {name}: {sorted(set(map(str, values)))}")

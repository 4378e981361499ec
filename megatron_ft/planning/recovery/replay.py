"""``ReplayPlan``: from the slices of a window to a dense state, one slice and one iteration at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.snapshot.plan import WindowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStep:
    """Load slice ``load``; then, unless it was the last, run the iteration of ``vote`` again."""

    load: int
    active: tuple[OperatorId, ...]
    """Operators of which anything has its full state now."""
    frozen: tuple[OperatorId, ...]
    """Operators that have nothing but compute weights: they compute outputs and input gradients, and no update."""
    vote: Vote | None
    """What the job knew of the iteration when it committed it; None after the last slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """How the dense state after iteration ``final_iteration`` comes from a window (MoEvement, section 3.3)."""

    start_iteration: int
    """The iteration whose state slice 0 was captured from."""
    steps: tuple[ReplayStep, ...]

    @property
    def final_iteration(self) -> int:
        """The iteration whose state is dense at the end."""
        return self.start_iteration + len(self.steps) - 1

    @property
    def iterations(self) -> tuple[int, ...]:
        """Iterations that run again."""
        return tuple(step.vote.iteration for step in self.steps if step.vote is not None)

    def validate(self) -> None:
        """Assert that slices are loaded in order, iterations follow each other, and nothing frozen is left."""
        assert self.steps, "a replay has at least one slice"
        assert [step.load for step in self.steps] == list(range(len(self.steps))), "slices are loaded in order"
        expected = tuple(range(self.start_iteration + 1, self.final_iteration + 1))
        assert self.iterations == expected, f"replays {self.iterations}, not {expected}"
        assert self.steps[-1].vote is None and not self.steps[-1].frozen, "the last slice makes the state dense"
        for before, after in self._pairs():
            assert set(before.active) <= set(after.active), f"slice {after.load} freezes what was active"
            everything = set(before.active) | set(before.frozen)
            assert everything == set(after.active) | set(after.frozen), f"slice {after.load} has other operators"
            assert not set(before.active) & set(before.frozen), f"slice {before.load} has an operator twice"

    def summary(self) -> str:
        """One log line."""
        frozen = sum(len(step.frozen) for step in self.steps if step.vote is not None)
        total = sum(len(step.frozen) + len(step.active) for step in self.steps if step.vote is not None)
        share = f", {100 * frozen / total:.0f} % of operators frozen on average" if total else ""
        return (
            f"{len(self.steps)} slices from iteration {self.start_iteration}, "
            f"{len(self.iterations)} iterations replayed to {self.final_iteration}{share}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ReplayPlan":
        """Inverse of ``to_json``."""
        steps = tuple(
            ReplayStep(
                load=step["load"],
                active=tuple(OperatorId(**operator) for operator in step["active"]),
                frozen=tuple(OperatorId(**operator) for operator in step["frozen"]),
                vote=None if step["vote"] is None else Vote.from_record(step["vote"]),
            )
            for step in content["steps"]
        )
        return cls(start_iteration=content["start_iteration"], steps=steps)

    def _pairs(self) -> Iterator[tuple[ReplayStep, ReplayStep]]:
        return zip(self.steps, self.steps[1:], strict=False)


def plan_replay(window: WindowPlan, start_iteration: int, votes: Mapping[int, Vote]) -> ReplayPlan:
    """The replay of a window whose slice 0 is of the state after ``start_iteration``.

    An operator of which one part is captured computes its gradients whole: parts are ranges of the same tensors.

    Args:
        votes: logged vote by iteration; those after ``start_iteration`` up to the window's last slice are needed.

    Raises:
        RecoveryError: a vote is missing.
    """
    steps = []
    for index in range(window.num_iterations):
        iteration = start_iteration + index + 1
        is_last = index + 1 == window.num_iterations
        if not is_last and iteration not in votes:
            raise RecoveryError(f"no logged vote of iteration {iteration}: {sorted(votes)} are there")
        active = {unit.operator for unit in window.active(index)}
        frozen = {unit.operator for unit in window.frozen(index)} - active
        vote = None if is_last else votes[iteration]
        steps.append(
            ReplayStep(
                load=index, active=tuple(sorted(active, key=str)), frozen=tuple(sorted(frozen, key=str)), vote=vote
            )
        )
    plan = ReplayPlan(start_iteration=start_iteration, steps=tuple(steps))
    plan.validate()
    return plan

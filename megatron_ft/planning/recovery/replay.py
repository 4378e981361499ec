"""``ReplayPlan``: from the slices of a window to a dense state, one slice and one iteration at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ft.errors import RecoveryError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.snapshot.plan import WindowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStep:
    """Load slice ``load``, if any is left; then, if there is a ``vote``, run its iteration again."""

    load: int | None
    """None behind the last slice: the state is dense."""
    active: tuple[OperatorId, ...]
    """Operators of which anything has its full state now."""
    frozen: tuple[OperatorId, ...]
    """Operators that have nothing but compute weights: they compute outputs and input gradients, and no update."""
    vote: Vote | None
    """What the job knew of the iteration when it committed it; None where the replay ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """How the dense state after iteration ``final_iteration`` comes from a window (MoEvement, section 3.3).

    With the last slice the state is dense; iterations behind the window are run again as they were at first.
    """

    start_iteration: int
    """The iteration whose state slice 0 was captured from."""
    steps: tuple[ReplayStep, ...]

    @property
    def final_iteration(self) -> int:
        """The iteration whose state is dense at the end."""
        return self.start_iteration + len(self.iterations)

    @property
    def iterations(self) -> tuple[int, ...]:
        """Iterations that run again."""
        return tuple(step.vote.iteration for step in self.steps if step.vote is not None)

    def validate(self) -> None:
        """Assert that slices are loaded in order, iterations follow each other, and nothing frozen is left."""
        assert self.steps, "a replay has at least one slice"
        loads = [step.load for step in self.steps if step.load is not None]
        assert loads and loads == list(range(len(loads))), "slices are loaded in order"
        assert all(step.load is None for step in self.steps[len(loads) :]), "slices are loaded one after the other"
        expected = tuple(range(self.start_iteration + 1, self.final_iteration + 1))
        assert self.iterations == expected, f"replays {self.iterations}, not {expected}"
        assert all(step.vote is not None for step in self.steps[:-1]), "only the last step may run nothing"
        assert not self.steps[len(loads) - 1].frozen, "the last slice makes the state dense"
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
            f"{sum(step.load is not None for step in self.steps)} slices from iteration {self.start_iteration}, "
            f"{len(self.iterations)} iterations replayed to {self.final_iteration}{share}"
        )


    def _pairs(self) -> Iterator[tuple[ReplayStep, ReplayStep]]:
        return zip(self.steps, self.steps[1:], strict=False)


def plan_replay(
    window: WindowPlan, start_iteration: int, votes: Mapping[int, Vote], *, until: int | None = None
) -> ReplayPlan:
    """The replay of a window whose slice 0 is of the state after ``start_iteration``.

    An operator of which one part is captured computes its gradients whole: parts are ranges of the same tensors.

    Args:
        votes: logged vote by iteration; those after ``start_iteration`` up to the end are needed.
        until: last iteration to run again, in or behind the window's last; None for the window's last.

    Raises:
        RecoveryError: a vote is missing, or the window is not whole by ``until``.
    """
    dense = start_iteration + window.num_iterations - 1
    last = dense if until is None else until
    if last < dense:
        raise RecoveryError(f"the window of iteration {start_iteration} is dense after iteration {dense}, not {last}")
    steps = []
    for index in range(max(window.num_iterations, last - start_iteration)):
        iteration, slice_index = start_iteration + index + 1, min(index, window.num_iterations - 1)
        if iteration <= last and iteration not in votes:
            raise RecoveryError(f"no logged vote of iteration {iteration}: {sorted(votes)} are there")
        active = {unit.operator for unit in window.active(slice_index)}
        frozen = {unit.operator for unit in window.frozen(slice_index)} - active
        steps.append(
            ReplayStep(
                load=index if index == slice_index else None,
                active=tuple(sorted(active, key=str)),
                frozen=tuple(sorted(frozen, key=str)),
                vote=votes[iteration] if iteration <= last else None,
            )
        )
    plan = ReplayPlan(start_iteration=start_iteration, steps=tuple(steps))
    plan.validate()
    return plan

"""``ReplayPlan``: restores the complete state from a window by loading slices and running iterations again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ft.errors import RecoveryError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.snapshot.plan import WindowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayStep:
    """Step of a replay: it loads a slice, if one is left, and then runs an iteration again."""

    load: int | None
    """Index of the slice to load; None if all slices were loaded in earlier steps."""
    active: tuple[OperatorId, ...]
    """Operators of which at least one part (range of tensor elements) has been loaded with its full state."""
    frozen: tuple[OperatorId, ...]
    """Operators with compute weights only: they compute outputs and input gradients, but are not updated."""
    vote: Vote | None
    """Committed vote of the iteration to run; None if this is the last step and only loads a slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The steps of a replay, which makes the dense state after ``final_iteration`` from a window (MoEvement, section
    3.3).

    The state is *dense* (complete for all operators) once the last slice is loaded. From then on, iterations run as in
    training.
    """

    start_iteration: int
    """Iteration after which slice 0 was captured."""
    steps: tuple[_ReplayStep, ...]

    @property
    def final_iteration(self) -> int:
        """Iteration of the state at the end of the replay."""
        return self.start_iteration + len(self.iterations)

    @property
    def iterations(self) -> tuple[int, ...]:
        """Iterations that the replay runs again."""
        return tuple(step.vote.iteration for step in self.steps if step.vote is not None)

    def validate(self) -> None:
        """Assert that slices are loaded in order, iterations are consecutive, and no operator stays frozen."""
        assert self.steps, "the replay has no step"
        loads = [step.load for step in self.steps if step.load is not None]
        assert loads and loads == list(range(len(loads))), "slices are not loaded in order"
        assert all(step.load is None for step in self.steps[len(loads) :]), "slices are not loaded in consecutive steps"
        expected = tuple(range(self.start_iteration + 1, self.final_iteration + 1))
        assert self.iterations == expected, f"the plan replays the iterations {self.iterations} instead of {expected}"
        assert all(step.vote is not None for step in self.steps[:-1]), "a step before the last one has no vote"
        assert not self.steps[len(loads) - 1].frozen, "operators are still frozen after the last slice"
        for before, after in self._pairs():
            assert set(before.active) <= set(after.active), f"slice {after.load} freezes an active operator"
            everything = set(before.active) | set(before.frozen)
            assert everything == set(after.active) | set(after.frozen), (
                f"slice {after.load} has other operators than the slice before"
            )
            assert not set(before.active) & set(before.frozen), f"slice {before.load} contains an operator twice"

    def summary(self) -> str:
        frozen = sum(len(step.frozen) for step in self.steps if step.vote is not None)
        total = sum(len(step.frozen) + len(step.active) for step in self.steps if step.vote is not None)
        share = f", {100 * frozen / total:.0f} % of operators frozen on average" if total else ""
        return (
            f"window of iteration {self.start_iteration}: {sum(step.load is not None for step in self.steps)} slices "
            f"loaded, {len(self.iterations)} iterations replayed up to iteration {self.final_iteration}{share}"
        )

    def _pairs(self) -> Iterator[tuple[_ReplayStep, _ReplayStep]]:
        return zip(self.steps, self.steps[1:], strict=False)

    @classmethod
    def of(
        cls, window: WindowPlan, start_iteration: int, votes: Mapping[int, Vote], *, until: int | None = None
    ) -> "ReplayPlan":
        """Plan the replay of a window whose slice 0 was captured after ``start_iteration``.

        Args:
            votes: logged votes by iteration, for all iterations to run.
            until: last iteration to run, not before the window's last iteration; None for the window's last iteration.

        Raises:
            RecoveryError: the vote of an iteration is missing, or ``until`` is before the last iteration of the window.
        """
        dense = start_iteration + window.num_iterations - 1
        last = dense if until is None else until
        if last < dense:
            raise RecoveryError(
                f"window of iteration {start_iteration}: its state is complete only after iteration {dense}, but the "
                f"replay must end after iteration {last}"
            )
        steps = []
        for index in range(max(window.num_iterations, last - start_iteration)):
            iteration, slice_index = start_iteration + index + 1, min(index, window.num_iterations - 1)
            if iteration <= last and iteration not in votes:
                raise RecoveryError(
                    f"the log of votes (results of all ranks) lacks iteration {iteration}; it has {sorted(votes)}"
                )
            active = {unit.operator for unit in window.active(slice_index)}
            # Parts are ranges of the same tensors, so one active part requires the gradients of all parts.
            frozen = {unit.operator for unit in window.frozen(slice_index)} - active
            steps.append(
                _ReplayStep(
                    # After the last slice nothing is left to load, and iterations run as in training.
                    load=index if index == slice_index else None,
                    active=tuple(sorted(active, key=str)),
                    frozen=tuple(sorted(frozen, key=str)),
                    vote=votes[iteration] if iteration <= last else None,
                )
            )
        plan = cls(start_iteration=start_iteration, steps=tuple(steps))
        plan.validate()
        return plan

"""Tests that a plan calls an engine for slices and iterations in turn, and ends if the engine refuses."""

from collections.abc import Collection

import pytest

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.snapshot.local_window import ReplayPlan, carry_out
from megatron_ft.operators import OperatorId
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan

HEAD, REST, EMBEDDING = (
    OperatorId(layer=2, kind="head"),
    OperatorId(layer=1, kind="non_expert"),
    OperatorId(layer=0, kind="embedding"),
)


class RecordingEngine:
    """Engine that records its calls, and refuses iteration ``refused``."""

    def __init__(self, refused: int = -1) -> None:
        self.asked: list[tuple[str, int, set[OperatorId]]] = []
        self.refused = refused

    def load(self, index: int) -> None:
        self.asked.append(("load", index, set()))

    def replay(self, vote: Vote, frozen: Collection[OperatorId]) -> None:
        if vote.iteration == self.refused:
            raise RecoveryError(f"iteration {vote.iteration} was replayed to other results")
        self.asked.append(("replay", vote.iteration, set(frozen)))


def plan_of_three() -> ReplayPlan:
    slices = tuple((Unit(operator=operator),) for operator in (HEAD, REST, EMBEDDING))
    votes = {
        number: Vote(
            generation=0,
            iteration=number,
            found_inf=False,
            grad_norm=1.0,
            clip_coefficient=1.0,
            loss_scale=1.0,
            loss=1.0,
            num_tokens=1,
            aux_loss=0.0,
            z_loss=0.0,
        )
        for number in (5, 6)
    }
    return ReplayPlan.of(WindowPlan(slices=slices, interval_iterations=3), 4, votes)


def test_slices_and_iterations_take_turns() -> None:
    engine = RecordingEngine()
    result = carry_out(plan_of_three(), engine)
    assert engine.asked == [
        ("load", 0, set()),
        ("replay", 5, {REST, EMBEDDING}),
        ("load", 1, set()),
        ("replay", 6, {EMBEDDING}),
        ("load", 2, set()),
    ]
    assert (result.final_iteration, result.num_iterations) == (6, 2)


def test_nothing_follows_an_iteration_that_is_refused() -> None:
    engine = RecordingEngine(refused=6)
    with pytest.raises(RecoveryError, match="iteration 6"):
        carry_out(plan_of_three(), engine)
    assert engine.asked[-1] == ("load", 1, set())

"""Tests the steps of a replay: which slices are loaded, which iterations run again, which operators are frozen."""

import dataclasses
import random

import pytest

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.snapshot.local_window import ReplayPlan
from megatron_ft.operators import OperatorId
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan

EMBEDDING = OperatorId(layer=0, kind="embedding")
HEAD = OperatorId(layer=3, kind="head")
REST = OperatorId(layer=1, kind="non_expert")
EXPERTS = [OperatorId(layer=1, kind="expert", expert=number) for number in range(4)]


def vote(iteration: int, **changes: float) -> Vote:
    values = {"grad_norm": 0.5, "clip_coefficient": 1.0, "loss_scale": 1.0, "loss": 2.0, "aux_loss": 0.0, "z_loss": 0.0}
    return Vote(generation=0, iteration=iteration, found_inf=False, num_tokens=64, **{**values, **changes})


def window(*slices: tuple[Unit, ...]) -> WindowPlan:
    return WindowPlan(slices=slices, interval_iterations=len(slices), reason="by hand")


def units(*operators: OperatorId) -> tuple[Unit, ...]:
    return tuple(Unit(operator=operator) for operator in operators)


def test_each_slice_thaws_its_operators_and_the_last_makes_the_state_dense() -> None:
    plan = ReplayPlan.of(
        window(units(EXPERTS[2], HEAD), units(EMBEDDING), units(REST, EXPERTS[0])),
        10,
        {number: vote(number) for number in range(10, 14)},
    )
    assert plan.iterations == (11, 12)
    assert plan.final_iteration == 12
    assert [set(step.frozen) for step in plan.steps] == [
        {EMBEDDING, REST, EXPERTS[0]},
        {REST, EXPERTS[0]},
        set(),
    ]
    assert set(plan.steps[0].active) == {EXPERTS[2], HEAD}
    assert [step.vote and step.vote.iteration for step in plan.steps] == [11, 12, None]


def test_an_operator_of_which_one_part_is_there_computes_its_gradients() -> None:
    parts = [Unit(operator=HEAD, part=part, num_parts=3) for part in range(3)]
    plan = ReplayPlan.of(
        window((parts[1],), (parts[0], *units(REST)), (parts[2],)), 5, {number: vote(number) for number in (6, 7)}
    )
    assert [HEAD in step.frozen for step in plan.steps] == [False, False, False]
    assert [REST in step.frozen for step in plan.steps] == [True, False, False]


def test_a_dense_snapshot_replays_nothing() -> None:
    plan = ReplayPlan.of(window(units(HEAD, REST)), 7, {})
    assert plan.iterations == ()
    assert plan.final_iteration == 7
    assert "0 iterations replayed" in plan.summary()


def test_a_missing_vote_is_named() -> None:
    with pytest.raises(RecoveryError, match=r"lacks iteration 12; it has \[11\]"):
        ReplayPlan.of(window(units(HEAD), units(REST), units(EMBEDDING)), 10, {11: vote(11)})


def test_any_order_covers_everything_once_and_survives_json() -> None:
    operators = [EMBEDDING, HEAD, REST, *EXPERTS]
    for seed in range(20):
        order = random.Random(seed).sample(operators, len(operators))
        num_slices = 1 + seed % len(operators)
        cuts = [len(order) * place // num_slices for place in range(num_slices + 1)]
        slices = [units(*order[cuts[place] : cuts[place + 1]]) for place in range(num_slices)]
        votes = {number: vote(number, loss=0.1 * number, grad_norm=1 / 3) for number in range(seed, seed + num_slices)}
        plan = ReplayPlan.of(window(*slices), seed, votes)
        plan.validate()
        assert set(plan.steps[-1].active) == set(operators)
        assert [len(step.active) for step in plan.steps] == cuts[1:]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda steps: (*steps[:2], dataclasses.replace(steps[2], frozen=(HEAD,))),
            "operators are still frozen after the last slice",
        ),
        (lambda steps: (steps[1], steps[0], steps[2]), "slices are not loaded in order"),
        (lambda steps: (dataclasses.replace(steps[0], vote=vote(12)), *steps[1:]), "replays"),
        (lambda steps: (*steps[:2], dataclasses.replace(steps[2], active=(HEAD,))), "freezes an active operator"),
        (lambda steps: (dataclasses.replace(steps[0], frozen=()), *steps[1:]), "other operators"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(spoil, message: str) -> None:
    plan = ReplayPlan.of(window(units(HEAD), units(REST), units(EMBEDDING)), 10, {11: vote(11), 12: vote(12)})
    with pytest.raises(AssertionError, match=message):
        dataclasses.replace(plan, steps=spoil(plan.steps)).validate()

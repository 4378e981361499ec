"""Tests the position of experts in each order, and when a change of popularity counts."""

import dataclasses
import json

import pytest

from megatron_ft.config.serialize import build_policy
from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.orders import (
    BackToFront,
    CapacityAware,
    HardCount,
    LayerOrder,
    OperatorOrder,
    TimeDecayed,
)
from megatron_ft.planning.snapshot.plan import Activations, ReorderTrigger
from megatron_ft.testing.demands import EMBEDDING, expert, rest

HEAD = OperatorId(layer=3, kind="head")
GATES = [OperatorId(layer=layer, kind="gate") for layer in (1, 2)]
OPERATORS = [
    EMBEDDING,
    *(expert(layer, number) for layer in (1, 2) for number in range(2)),
    *GATES,
    rest(1),
    rest(2),
    HEAD,
]
COUNTED = Activations(
    layers=(1, 2),
    tokens=(((90, 10), (50, 50)), ((0, 100), (30, 70))),
)
TAIL = ["3.head", "2.gate", "2.non_expert", "1.gate", "1.non_expert", "0.embedding"]


@pytest.mark.parametrize(
    ("order", "experts"),
    [
        (HardCount(), ["2.expert.0", "1.expert.0", "1.expert.1", "2.expert.1"]),
        (TimeDecayed(decay=0.0), ["1.expert.0", "2.expert.0", "2.expert.1", "1.expert.1"]),
        (TimeDecayed(decay=0.9), ["2.expert.0", "1.expert.0", "1.expert.1", "2.expert.1"]),
        (CapacityAware(capacities=(1.0, 10.0)), ["1.expert.1", "2.expert.1", "2.expert.0", "1.expert.0"]),
    ],
    ids=["hard", "newest", "decayed", "capacity"],
)
def test_popular_experts_and_everything_that_is_no_expert_come_last(order: OperatorOrder, experts: list[str]) -> None:
    found = order.order(OPERATORS, COUNTED)
    assert [str(operator) for operator in found] == experts + TAIL
    assert order.order(OPERATORS[::-1], COUNTED) == found
    assert order.uses_activations


def test_hard_counts_are_those_of_all_records_together() -> None:
    assert HardCount().order(OPERATORS, COUNTED.collapsed()) == HardCount().order(OPERATORS, COUNTED)


def test_an_order_that_is_not_there_is_refused_by_name() -> None:
    order = {"_target_": "megatron_ft.planning.snapshot.orders.SoftCount"}
    with pytest.raises(ConfigError, match=r"SoftCount"):
        build_policy("snapshot.policy.order", order)


@pytest.mark.parametrize("order", [HardCount(), TimeDecayed(), CapacityAware(capacities=(1.0, 2.0))])
def test_without_counts_experts_are_equal_and_still_before_the_rest(order: OperatorOrder) -> None:
    experts = ["1.expert.0", "1.expert.1", "2.expert.0", "2.expert.1"]
    assert [str(operator) for operator in order.order(OPERATORS, None)] == experts + TAIL


def test_back_to_front_goes_from_the_head_to_the_embedding() -> None:
    dense = [EMBEDDING, rest(1), rest(2), HEAD]
    assert BackToFront().order(dense, None) == (HEAD, rest(2), rest(1), EMBEDDING)
    assert HardCount().order(dense, None) == BackToFront().order(dense, None)
    assert LayerOrder().order(dense[::-1], None) == tuple(dense)
    assert not BackToFront().uses_activations
    assert not LayerOrder().uses_activations


@pytest.mark.parametrize("capacities", [(1.0,), (1.0, 0.0), (1.0, float("nan"))])
def test_capacities_that_do_not_fit_are_refused(capacities: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"snapshot\.policy\.order\.capacities="):
        CapacityAware(capacities=capacities).order(OPERATORS, COUNTED)


def test_a_decay_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"snapshot\.policy\.order\.decay=1\.0"):
        TimeDecayed(decay=1.0).order(OPERATORS, COUNTED)


def test_activations_survive_json_and_check_their_shape() -> None:
    COUNTED.validate()
    assert Activations.from_json(json.loads(json.dumps(dataclasses.asdict(COUNTED)))) == COUNTED
    assert COUNTED.totals == ((90, 110), (80, 120))
    for tokens in ((((1, 2),),), (((1, 2), (3,)),), (((1, 2), (3, -4)),), ()):
        with pytest.raises(AssertionError):
            Activations(layers=(1, 2), tokens=tokens).validate()


def shares(*per_mille: int) -> Activations:
    return Activations(layers=(1,), tokens=((per_mille,),))


def test_a_quarter_of_the_experts_must_move_by_more_than_a_tenth() -> None:
    trigger, before = ReorderTrigger(), shares(1000, 1000, 1000, 1000, 1000, 1000, 1000, 1000)
    assert not trigger.fires(before, shares(1090, 910, 1000, 1000, 1000, 1000, 1000, 1000))
    assert trigger.fires(before, shares(1110, 890, 1000, 1000, 1000, 1000, 1000, 1000))
    one_moved = shares(1140, 980, 980, 980, 980, 980, 980, 980)
    assert not trigger.fires(before, one_moved)
    assert ReorderTrigger(min_share=0.125).fires(before, one_moved)


def test_more_tokens_in_the_same_shares_are_no_change() -> None:
    assert not ReorderTrigger().fires(shares(1, 2, 3), shares(100, 200, 300))


def test_slow_drift_fires_because_the_order_in_force_is_what_counts() -> None:
    trigger, before = ReorderTrigger(), shares(1000, 1000)
    drifting = [shares(1000 + 30 * week, 1000 - 30 * week) for week in range(1, 6)]
    steps = [trigger.fires(old, new) for old, new in zip([before, *drifting], drifting, strict=False)]
    assert steps == [False] * 5, "no single step is large enough"
    assert [trigger.fires(before, now) for now in drifting] == [False, False, False, True, True]


def test_an_expert_that_wakes_up_has_moved() -> None:
    assert ReorderTrigger().fires(shares(0, 0, 8, 8), shares(1, 0, 8, 8))


def test_first_counts_trigger_another_order_and_missing_ones_do_not() -> None:
    assert ReorderTrigger().fires(None, shares(1, 1))
    assert not ReorderTrigger().fires(shares(1, 1), None)
    assert not ReorderTrigger().fires(None, None)
    assert not ReorderTrigger(min_share=1.1).fires(None, shares(1, 1))

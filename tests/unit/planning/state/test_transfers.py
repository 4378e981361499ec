"""Compares plans with a reference that processes every element, and with examples computed by hand."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.state.holdings import STORAGE, Holding, Holdings, Medium, Need, Needs
from megatron_ft.planning.state.tensors import StateTensor, TensorIndex
from megatron_ft.planning.state.transfers import TransferPlan
from tests.helpers.state_transfers import check_plan, held_elements, needed_elements, planned, tensor

MASTER, MOMENT, WIDE = tensor(), tensor(kind="exp_avg"), tensor("v", 7, item=8)
INDEX = TensorIndex.of([WIDE, MOMENT, MASTER])


def held(
    rank: int, start: int, stop: int, *, of: StateTensor = MASTER, iteration: int = 5, medium: Medium = Medium.LIVE
) -> Holding:
    return Holding(
        rank=rank, domain=f"node{rank}", tensor=of, start=start, stop=stop, iteration=iteration, medium=medium
    )


def need(rank: int, start: int, stop: int, *, of: StateTensor = MASTER, iteration: int = 5) -> Need:
    return Need(rank=rank, tensor=of, start=start, stop=stop, iteration=iteration)


def have(*rows: Holding) -> Holdings:
    return Holdings.of(INDEX, rows)


def want(*rows: Need) -> Needs:
    return Needs.of(INDEX, rows)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[StateTensor, int, int]:
    of = draw(st.sampled_from(INDEX.tensors))
    start = draw(st.integers(0, of.num_elements - 1))
    return of, start, draw(st.integers(start + 1, of.num_elements))


@st.composite
def holding_rows(draw: st.DrawFn) -> Holding:
    of, start, stop = draw(ranges())
    medium = draw(st.sampled_from(Medium))
    rank = STORAGE if medium is Medium.STORAGE else draw(st.integers(0, 4))
    return held(rank, start, stop, of=of, iteration=draw(st.sampled_from([5, 5, 5, 6])), medium=medium)


@st.composite
def need_rows(draw: st.DrawFn) -> Need:
    of, start, stop = draw(ranges())
    return need(draw(st.integers(0, 5)), start, stop, of=of, iteration=draw(st.sampled_from([5, 5, 5, 6])))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(holding_rows(), max_size=14),
    st.lists(need_rows(), max_size=8),
    st.integers(32, 120),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_every_need_is_met_once_or_what_is_missing_is_named(
    holdings: list[Holding], needs: list[Need], limit_bytes: int, shuffler: random.Random, is_whole: bool
) -> None:
    if is_whole:  # holders of everything: plans rather than refusals
        holdings = holdings + [held(4, 0, of.num_elements, of=of, iteration=i) for of in INDEX.tensors for i in (5, 6)]
    have_all, want_all = have(*holdings), want(*needs)
    holders = held_elements(have_all)
    lacking = {element for _, element in needed_elements(want_all) if element not in holders}
    plan = TransferPlan.of(have_all, want_all, limit_bytes=limit_bytes, min_piece_bytes=1)
    if lacking:
        assert isinstance(plan, Declined)
        named = [(m.tensor, place, m.iteration) for m in plan.missing for place in range(m.start, m.stop)]
        assert sorted(named, key=str) == sorted(lacking, key=str)
        for missing in plan.missing:
            others = {i for of, _, i in holders if of == missing.tensor} - {missing.iteration}
            assert set(missing.held_iterations) == others
        return
    assert not isinstance(plan, Declined), plan.summary()
    check_plan(plan, have_all, want_all)
    shuffler.shuffle(holdings)
    shuffler.shuffle(needs)
    index = TensorIndex.of(shuffler.sample(INDEX.tensors, len(INDEX)))
    again = TransferPlan.of(
        Holdings.of(index, holdings + holdings[:3]),
        Needs.of(index, needs + needs[:3]),
        limit_bytes=limit_bytes,
        min_piece_bytes=1,
    )
    assert not isinstance(again, Declined)
    assert again.digest() == plan.digest()


def test_a_rank_keeps_its_own_state_and_asks_the_fastest_medium_for_the_rest() -> None:
    holdings = have(
        held(0, 0, 6),
        held(1, 4, 9, medium=Medium.STATE_COPY),
        held(2, 0, 12, medium=Medium.PEER_WINDOW),
        held(STORAGE, 0, 12, medium=Medium.STORAGE),
        held(3, 0, 12, iteration=4),
    )
    plan = planned(holdings, want(need(0, 0, 12), need(2, 0, 3)))
    moves = [(t.source, t.target, t.start, t.stop, t.medium) for t in plan.transfers()]
    assert moves == [(1, 0, 6, 9, Medium.STATE_COPY), (2, 0, 9, 12, Medium.PEER_WINDOW)]
    assert [(k.start, k.stop, k.medium) for k in plan.kept_by(2)] == [(0, 3, Medium.PEER_WINDOW)]


def test_storage_is_read_by_each_rank_itself() -> None:
    plan = planned(have(held(STORAGE, 0, 12, medium=Medium.STORAGE)), want(need(0, 0, 12), need(1, 0, 12)))
    assert plan.sent_bytes() == {STORAGE: 96}
    assert plan.received_bytes() == {0: 48, 1: 48}


def test_a_joining_rank_gets_equal_parts_of_what_all_hold() -> None:
    plan = planned(have(*(held(rank, 0, 12) for rank in range(4))), want(*(need(rank, 0, 12) for rank in range(5))))
    assert plan.sent_bytes() == dict.fromkeys(range(4), 12)
    assert plan.received_bytes() == {4: 48}


def test_few_bytes_come_from_one_sender() -> None:
    holdings = have(*(held(rank, 0, 12) for rank in range(4)))
    plan = planned(holdings, want(need(4, 0, 12)), min_piece_bytes=25)
    assert plan.sent_bytes() == {0: 48}
    plan = planned(holdings, want(need(4, 0, 12)), min_piece_bytes=24)
    assert plan.sent_bytes() == {0: 24, 1: 24}


def test_who_holds_something_alone_is_spared_elsewhere() -> None:
    holdings = have(*(held(rank, 0, 12) for rank in range(3)), held(0, 0, 6, of=MOMENT))
    plan = planned(holdings, want(need(5, 0, 12), need(5, 0, 6, of=MOMENT)))
    assert plan.sent_bytes() == {0: 24, 1: 24, 2: 24}


def test_holders_of_overlapping_ranges_share_what_both_have() -> None:
    plan = planned(have(held(0, 0, 8), held(1, 4, 12), held(1, 9, 12)), want(need(5, 0, 12)))
    assert plan.sent_bytes() == {0: 24, 1: 24}


def test_a_window_brings_operators_of_the_iterations_at_which_it_captured_them() -> None:
    holdings = have(
        held(0, 0, 12, iteration=7, medium=Medium.OWN_WINDOW),
        held(1, 0, 12, iteration=8, medium=Medium.PEER_WINDOW),
        held(1, 0, 12, of=MOMENT, iteration=8, medium=Medium.PEER_WINDOW),
    )
    plan = planned(holdings, want(need(0, 0, 12, iteration=7), need(0, 0, 12, of=MOMENT, iteration=8)))
    assert [(t.source, t.tensor, t.iteration) for t in plan.transfers()] == [(1, MOMENT, 8)]


def test_rounds_hold_no_more_than_the_limit_and_end_tensor_by_tensor() -> None:
    holdings = have(held(0, 0, 12), held(0, 0, 7, of=WIDE), held(1, 0, 12))
    plan = planned(holdings, want(need(2, 0, 12), need(2, 0, 7, of=WIDE), need(3, 0, 12)), limit_bytes=32)
    total = plan.sent_bytes()[0] + plan.received_bytes()[2]
    assert plan.num_bytes / 32 / 2 <= plan.num_rounds <= 1 + total / (32 * 3 / 4)
    last = {t.tensor: t.round for t in plan.transfers(0)}  # rounds ascend, so the last one of a tensor remains
    assert last[WIDE] < plan.num_rounds


def test_what_nobody_holds_is_named_with_what_is_held_instead() -> None:
    holdings = have(held(0, 0, 4), held(1, 9, 12), held(1, 0, 12, iteration=4))
    declined = TransferPlan.of(holdings, want(need(2, 0, 12), need(3, 2, 8)))
    assert isinstance(declined, Declined)
    (missing,) = declined.missing
    assert (missing.tensor, missing.start, missing.stop, missing.iteration) == (MASTER, 4, 9, 5)
    assert missing.held_iterations == (4,)
    missing_text = "w[0]/master elements 4 to 9 of iteration 5 (iterations held: 4)"
    assert declined.summary() == f"no living rank holds these elements: {missing_text}; operators 1.non_expert"


def test_lost_ranks_and_domains_hold_nothing() -> None:
    holdings = have(held(0, 0, 12), held(1, 0, 12, medium=Medium.STATE_COPY), held(2, 0, 12, iteration=4))
    assert isinstance(TransferPlan.of(holdings.without(ranks=[0], domains=["node1"]), want(need(2, 0, 1))), Declined)
    moved = planned(holdings.without(domains=["node0"]).renumbered({1: 7, 2: 3}), want(need(3, 0, 12)))
    assert [(t.source, t.target) for t in moved.transfers()] == [(7, 3)]
    assert [row.domain for row in holdings.renumbered({1: 7})] == ["node1"]


def test_nothing_needed_moves_nothing() -> None:
    plan = planned(have(held(0, 0, 12)), want())
    assert (len(plan), plan.num_rounds, plan.kept_bytes) == (0, 0, 0)
    assert plan.summary().startswith("0 bytes move in 0 transfers and 0 rounds")


def test_rows_outside_of_their_tensors_are_refused() -> None:
    fine = have(held(0, 0, 12))
    with pytest.raises(
        ConfigError, match=r"w\[0\]/master=elements 3 to 13 on rank 0: must be a non-empty range of elements 0 to 12"
    ):
        TransferPlan.of(have(held(0, 3, 13)), want())
    with pytest.raises(ConfigError, match="must be a non-empty range of elements 0 to 12"):
        TransferPlan.of(fine, want(need(1, 4, 4)))
    with pytest.raises(ConfigError, match="on a rank of at least 0"):
        TransferPlan.of(fine, want(need(STORAGE, 0, 4)))
    with pytest.raises(ConfigError, match="must be -1 if the medium is storage, and a rank otherwise"):
        TransferPlan.of(have(held(0, 0, 4, medium=Medium.STORAGE)), want())
    with pytest.raises(ConfigError, match="limit_bytes=15: must be at least 16, 4 times the largest item"):
        TransferPlan.of(fine, want(need(1, 0, 4)), limit_bytes=15)


def test_tensors_are_described_once() -> None:
    with pytest.raises(ConfigError, match="must equal the earlier entry for the same tensor"):
        TensorIndex.of([MASTER, tensor(num_elements=3)])
    with pytest.raises(ConfigError, match="at least one element"):
        TensorIndex.of([tensor(num_elements=0)])


def test_positions_name_their_tensors() -> None:
    assert [t.key for t in INDEX.tensors] == [("v", 0, "master"), ("w", 0, "exp_avg"), ("w", 0, "master")]
    assert INDEX.tensor_at(np.array([0, 6, 7, 18, 19, 30])).tolist() == [0, 0, 1, 1, 2, 2]

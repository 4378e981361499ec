"""Compares packing in blocks with packing unit by unit, and checks that no smaller budget is possible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megatron_ft.planning.snapshot import sparse_window
from megatron_ft.planning.snapshot.demand import Demand, UnitBytes
from megatron_ft.planning.snapshot.policy import SnapshotContext
from megatron_ft.planning.snapshot.sparse_window import SparseWindow, _least_peak_bytes, _num_parts, _Packing
from megatron_ft.testing.demands import expert, shard


@st.composite
def tables(draw: st.DrawFn) -> UnitBytes:
    """Draw units on ranks. A rank may have no part of a unit."""
    shape = (draw(st.integers(1, 24)), draw(st.integers(1, 4)))
    frozen = draw(arrays(np.int64, shape, elements=st.integers(0, 9)))
    extra = draw(arrays(np.int64, shape, elements=st.integers(0, 40)))
    return UnitBytes(full=frozen + extra * (frozen > 0), frozen=frozen)


def walk(table: UnitBytes, budget: int, max_slices: int) -> list[tuple[int, ...]] | None:
    """Take each unit in order if all ranks that have it stay within the budget."""
    remaining, slices = list(range(len(table.full))), []
    num_ranks = table.full.shape[1]
    while remaining:
        load = [int(sum(table.frozen[unit, rank] for unit in remaining)) for rank in range(num_ranks)]
        if max(load) > budget or len(slices) == max_slices:
            return None
        taken = []
        for unit in remaining:
            after = [load[rank] + int(table.full[unit, rank] - table.frozen[unit, rank]) for rank in range(num_ranks)]
            if max(after) <= budget:
                taken.append(unit)
                load = after
        if not taken:
            return None
        slices.append(tuple(taken))
        remaining = [unit for unit in remaining if unit not in taken]
    return slices


@settings(max_examples=200, deadline=None)
@given(table=tables(), budget=st.integers(0, 300), max_slices=st.integers(1, 8), block=st.integers(1, 30))
def test_blocks_pack_as_a_walk_does(table: UnitBytes, budget: int, max_slices: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_window, "_BLOCK", block)
        found = _Packing.of(table, budget, max_slices)
    expected = walk(table, budget, max_slices)
    assert (None if found is None else list(found.slices)) == expected


@settings(max_examples=100, deadline=None)
@given(table=tables(), num_slices=st.integers(1, 6))
def test_the_searched_budget_packs_and_the_next_smaller_does_not(table: UnitBytes, num_slices: int) -> None:
    whole = _Packing(slices=(tuple(range(len(table.full))),), budget_bytes=int(table.full.sum(axis=0).max()))
    low = _least_peak_bytes(table, num_slices) - 1
    found = _Packing.smallest(table, low, whole, num_slices)
    assert len(found.slices) <= num_slices
    assert walk(table, found.budget_bytes, num_slices) == list(found.slices)
    assert found.budget_bytes == low + 1 or walk(table, found.budget_bytes - 1, num_slices) is None


@settings(max_examples=100, deadline=None)
@given(table=tables(), num_slices=st.integers(1, 6))
def test_no_window_has_a_smaller_peak_than_the_bound(table: UnitBytes, num_slices: int) -> None:
    assert walk(table, _least_peak_bytes(table, num_slices) - 1, num_slices) is None


@settings(max_examples=100, deadline=None)
@given(table=tables(), budget=st.integers(1, 300))
def test_parts_fit_beside_frozen_bytes_and_one_fewer_would_not(table: UnitBytes, budget: int) -> None:
    frozen = table.frozen.sum(axis=0)
    for unit, parts in enumerate(_num_parts(table, np.zeros_like(table.full), budget, 64)):
        extra = table.full[unit] - table.frozen[unit]
        room = np.maximum(np.maximum(budget - frozen, -(-frozen // 8)), 1)
        assert (extra <= room * parts).all() or parts == 64
        assert parts == 1 or (extra > room * (parts - 1)).any()


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(20, 3000), min_size=1, max_size=3),
    num_shards=st.integers(1, 3),
    wanted=st.integers(2, 12),
)
def test_rounding_of_parts_costs_no_stall(sizes: list[int], num_shards: int, wanted: int) -> None:
    shards = [
        shard(expert(1, number), size, name=f"w{index}")
        for number, size in enumerate(sizes)
        for index in range(num_shards)
    ]
    demand = Demand(shards_by_rank=(tuple(shards),))
    full, frozen = int(demand.operator_bytes.full.sum()), int(demand.operator_bytes.frozen.sum())
    room = max((full - frozen) // wanted, 4 * num_shards * 16)
    given_budget = SnapshotContext(bandwidth_bytes_per_second=frozen + room, iteration_seconds=1.0)
    plan = SparseWindow(max_window_iterations=200).plan(demand, given_budget)
    assert plan.reason.endswith("no stall")

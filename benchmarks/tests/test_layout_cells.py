"""Tests which combinations of layout and protection the campaign ``layouts-bitwise`` predicts to survive."""

import random

import pytest

from benchmarks.covering import Row
from benchmarks.layout_cells import Cell, has_meaning, prospect_of
from benchmarks.layouts_bitwise import rejoining
from benchmarks.localized_jobs import Layout, in_order, single_faults
from megatron_ft.failpoints import ITERATION_PHASES

ROW: Row = {
    "tp": 1,
    "pp": "2",
    "optimizer": "sharded",
    "replicas": True,
    "windows": True,
    "nodes": "return",
    "way": "fewer nodes",
    "dtype": "bf16",
}


def test_replicas_and_copies_survive_the_loss_of_any_node() -> None:
    for row in (ROW, {**ROW, "tp": 2}, {**ROW, "nodes": "none", "optimizer": "whole"}):
        prospect = prospect_of(Cell.of(row))
        assert (prospect.survives, prospect.strategies, prospect.loses_nodes) == (True, ("living_state",), True)


def test_windows_survive_with_nodes_that_take_places() -> None:
    prospect = prospect_of(Cell.of({**ROW, "replicas": False, "way": "kept layout"}))
    assert (prospect.survives, prospect.strategies) == (True, ("localized_replay",))


def test_without_another_node_windows_survive_only_the_death_of_ranks() -> None:
    prospect = prospect_of(Cell.of({**ROW, "replicas": False, "nodes": "none", "way": "restart"}))
    assert (prospect.survives, prospect.strategies, prospect.loses_nodes) == (True, ("rollback",), False)


def test_a_cell_without_copies_declines() -> None:
    prospect = prospect_of(Cell.of({**ROW, "replicas": False, "windows": False, "nodes": "none", "way": "restart"}))
    assert not prospect.survives and not prospect.refused
    assert "rollback: snapshot.policy=null" in prospect.declined


def test_a_cell_with_one_lane_is_not_divided() -> None:
    prospect = prospect_of(Cell.of({**ROW, "tp": 2, "pp": "4"}))
    assert not prospect.survives
    assert "model replica" in prospect.refused


@pytest.mark.parametrize(
    ("nodes", "way", "replicas", "expected"),
    [
        ("none", "restart", False, True),
        ("spare", "restart", False, False),
        ("none", "kept layout", False, False),
        ("spare", "kept layout", False, True),
        ("none", "fewer nodes", False, False),
        ("none", "fewer nodes", True, True),
    ],
)
def test_values_without_effect_are_not_combined(nodes: str, way: str, replicas: bool, expected: bool) -> None:
    assert has_meaning({**ROW, "nodes": nodes, "way": way, "replicas": replicas}) == expected


@pytest.mark.parametrize(("keeps_layout", "generations"), [(True, [0, 2, 4]), (False, [0, 1, 2])])
def test_each_fault_ends_a_membership_that_will_exist(keeps_layout: bool, generations: list[int]) -> None:
    rng = random.Random(1)
    groups = single_faults(Layout(pp=2, dp=2), ("forward", "capture", "gather"), rng)
    rolled_back = [[{**fault, "strategy": "rollback"} for fault in group] for group in groups]
    faults = in_order(rolled_back, rng, keeps_layout=keeps_layout)
    assert [fault["generation"] for fault in faults] == generations
    assert [fault["stage"] for fault in faults] == [0, 1, 1]


@pytest.mark.parametrize("windows", [True, False])
def test_faults_come_in_phases_that_occur(windows: bool) -> None:
    job = rejoining(0, Cell.of({**ROW, "windows": windows}), ITERATION_PHASES, kills_nodes=True)
    phases = [fault["phase"] for fault in job.faults]
    assert ("capture" in phases, "replicate" in phases, "gather" in phases) == (windows, windows, True)
    assert [fault["generation"] for fault in job.faults] == list(range(0, 2 * len(phases), 2))

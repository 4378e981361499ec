"""Tests which parts of the model spares build in advance, and which spare takes which place."""

from typing import Any

import pytest

from megatron_ft.planning.recovery.prebuild import (
    PrebuildPlan,
    PrebuildReport,
    bytes_of_parts,
    can_prebuild,
    extra_bytes,
    most_parts,
)
from megatron_ft.testing.engines import micro_config

KEPT = {
    "model.num_layers": 4,
    "model.untie_embeddings_and_output_weights": True,
    "parallel.pipeline_model_parallel_size": 2,
    "launch.num_nodes": 4,
    "launch.ranks_per_node": 1,
    "recovery.keep_layout": True,
    "nodes.num_spare_nodes": 1,
    "placement.algorithm": None,
    "snapshot.policy": {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"},
    "snapshot.num_peer_copies": 1,
    "snapshot.iteration_seconds": 1.0,
    "snapshot.bandwidth_bytes_per_second": 4e5,
}


def plan(**changes: Any) -> PrebuildPlan:
    return PrebuildPlan.of(micro_config({**KEPT, **{key.replace("__", "."): value for key, value in changes.items()}}))


def test_nodes_of_one_stage_are_one_part() -> None:
    found = plan()
    assert (found.parts, found.stages, found.num_built) == (((0, 1), (2, 3)), ((0,), (1,)), 1)


def test_nodes_with_other_experts_are_other_parts() -> None:
    found = plan(parallel__expert_model_parallel_size=2)
    assert (found.parts, found.stages) == (((0,), (1,), (2,), (3,)), ((0,), (0,), (1,), (1,)))


def test_a_node_with_several_stages_is_one_part() -> None:
    found = plan(launch__ranks_per_node=2, launch__num_nodes=1, snapshot__num_peer_copies=0)
    assert (found.parts, found.stages) == (((0,),), ((0, 1),))


def test_parts_of_more_nodes_come_first() -> None:
    # Node 1 of 3 has a rank of each stage; ranks 0 and 1 are stage 0 of the first node, and so on.
    found = plan(launch__num_nodes=3, launch__ranks_per_node=2, training__global_batch_size=6)
    assert found.parts == ((0,), (1,), (2,))
    assert found.stages == ((0,), (0, 1), (1,))
    found = plan(launch__num_nodes=6, launch__ranks_per_node=1, training__global_batch_size=6)
    assert found.parts == ((0, 1, 2), (3, 4, 5))


def test_spares_begin_with_different_parts_and_former_members_with_their_own() -> None:
    found = plan(nodes__num_spare_nodes=3)
    assert [found.of_node(node) for node in (4, 5, 6)] == [(0,), (1,), (0,)]
    assert [found.of_node(node) for node in (0, 1, 2, 3)] == [(0,), (0,), (1,), (1,)]
    found = plan(nodes__num_spare_nodes=3, nodes__num_prebuilt_parts=2)
    assert [found.of_node(node) for node in (4, 5, 6)] == [(0, 1), (1, 0), (0, 1)]


def test_no_more_parts_than_there_are() -> None:
    assert plan(nodes__num_prebuilt_parts=9).of_node(4) == (0, 1)
    assert plan(nodes__num_prebuilt_parts=0).of_node(4) == ()


@pytest.mark.parametrize(
    ("places", "spares", "expected"),
    [
        ([3], [4, 5], {3: 5}),  # node 5 has built stage 1
        ([0], [5, 4], {0: 4}),
        ([0], [5], {0: 5}),
        ([2, 3], [4, 5, 6], {2: 5, 3: 4}),
        ([0, 2], [5, 4], {0: 4, 2: 5}),
        ([], [4], {}),
    ],
)
def test_a_place_gets_a_spare_that_has_built_its_part(
    places: list[int], spares: list[int], expected: dict[int, int]
) -> None:
    assert plan(nodes__num_spare_nodes=3).assign(places, spares) == expected


def test_a_spare_that_began_with_the_part_is_preferred() -> None:
    assert plan(nodes__num_spare_nodes=2, nodes__num_prebuilt_parts=2).assign([3], [4, 5]) == {3: 5}


def test_without_parts_spares_are_taken_in_order() -> None:
    assert plan(nodes__num_spare_nodes=2, nodes__num_prebuilt_parts=0).assign([3, 1], [4, 5]) == {3: 4, 1: 5}


def test_only_jobs_that_keep_their_layout_with_spares_on_a_cpu_prebuild() -> None:
    config = micro_config(KEPT)
    assert can_prebuild(config)
    config.training.device = "cuda"
    assert not can_prebuild(config)
    assert not can_prebuild(micro_config({**KEPT, "nodes.num_spare_nodes": 0, "nodes.restart_lost_nodes": True}))
    assert PrebuildReport.of(micro_config({**KEPT, "nodes.num_prebuilt_parts": 0}), (1, 1), "") is None


def test_memory_limits_the_number_of_parts() -> None:
    config = micro_config({**KEPT, "launch.num_nodes": 2, "launch.ranks_per_node": 2})
    part_bytes = bytes_of_parts(PrebuildPlan.of(config), config, (10, 7))
    assert part_bytes == (20, 14)
    assert [extra_bytes(part_bytes, number) for number in (0, 1, 2)] == [0, 0, 20]
    assert [most_parts(part_bytes, free) for free in (-5, 0, 19, 20, 1000)] == [1, 1, 1, 2, 2]
    report = PrebuildReport.of(config, (10, 7), "why")
    assert report is not None and (report.spares, report.part_bytes, report.extra_bytes) == ((2,), (20, 14), 0)

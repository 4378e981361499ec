"""Compares parallel coordinates with Megatron's rule, written out for small world sizes."""

import pytest

from megatron_ft.config.job import ParallelConfig
from megatron_ft.errors import ConfigError
from megatron_ft.topology import Cluster, Topology


def topology(world_size: int, **sizes: int) -> Topology:
    return Topology.of(ParallelConfig(**{f"{name}_parallel_size": size for name, size in sizes.items()}), world_size)


def test_tensor_ranks_are_neighbours_and_stages_are_blocks() -> None:
    layout = topology(8, tensor_model=2, pipeline_model=2)
    places = [layout.coordinates(rank) for rank in range(8)]
    assert [place.tp for place in places] == [0, 1] * 4
    assert [place.dp for place in places] == [0, 0, 1, 1] * 2
    assert [place.pp for place in places] == [0] * 4 + [1] * 4


def test_expert_ranks_count_through_a_stage_with_tensor_parallelism() -> None:
    layout = topology(8, tensor_model=2, pipeline_model=2, expert_model=2)
    places = [layout.coordinates(rank) for rank in range(4)]
    assert [place.ep for place in places] == [0, 1, 0, 1]
    assert [place.expert_dp for place in places] == [0, 0, 1, 1]
    assert (layout.data_parallel_size, layout.expert_data_parallel_size, layout.stage_size) == (2, 2, 4)


def test_context_ranks_lie_between_tensor_and_data() -> None:
    layout = topology(8, tensor_model=2, context=2)
    assert [layout.coordinates(rank).cp for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_every_rank_has_its_own_place() -> None:
    layout = topology(24, tensor_model=2, pipeline_model=3, expert_model=4)
    places = {(place.tp, place.cp, place.dp, place.pp) for _, place in layout.ranks()}
    expert_places = {(place.ep, place.expert_dp, place.pp) for _, place in layout.ranks()}
    assert len(places) == 24 and len(expert_places) == 24


def test_virtual_chunks_interleave_stages() -> None:
    layout = topology(2, pipeline_model=2, virtual_pipeline_model=2)
    assert layout.stage_layers(8, 0) == (1, 2, 5, 6)
    assert layout.stage_layers(8, 1) == (3, 4, 7, 8)


@pytest.mark.parametrize(
    ("world_size", "sizes", "key"),
    [
        (3, {"tensor_model": 2}, "launch.num_nodes"),
        (4, {"expert_model": 3}, "parallel.expert_model_parallel_size"),
        (4, {"pipeline_model": 0}, "parallel.pipeline_model_parallel_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(world_size: int, sizes: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        topology(world_size, **sizes)


def test_cluster_knows_nodes_and_losses() -> None:
    cluster = Cluster.of(num_nodes=3, ranks_per_node=4)
    assert cluster.node_of(7) == 1 and cluster.ranks_of(2) == (8, 9, 10, 11)
    assert cluster.failure_domains == ("node0", "node1", "node2")
    assert cluster.without(1).alive == {0, 2}

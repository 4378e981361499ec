"""Compares bytes of units and slices with sums over the pieces, and estimates with the parameters of the model."""

from collections import Counter
from collections.abc import Sequence

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.operators import StateShard, check_shards, operators_of
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.memory import NodeMemory, PeerAssignment, host_bytes
from megatron_ft.planning.snapshot.plan import Piece, Unit, WindowPlan, slice_bytes, window_bytes
from megatron_ft.planning.snapshot.report import estimate_demand
from megatron_ft.planning.snapshot.sparse_window import SparseWindow
from megatron_ft.testing.demands import context, dense_model, one_huge_embedding, uneven
from megatron_ft.topology import Topology


def unit_bytes(unit: Unit, shards: Sequence[StateShard]) -> tuple[int, int]:
    """Return (full, frozen) bytes of ``unit`` in ``shards`` without alignment, as sums over its pieces."""
    full, frozen = (
        WindowPlan(slices=((unit,),), interval_iterations=1),
        WindowPlan(slices=((), (unit,)), interval_iterations=2),
    )
    return (
        sum(piece.num_bytes for piece in Piece.of_slice(full, 0, shards)),
        sum(piece.num_bytes for piece in Piece.of_slice(frozen, 0, shards)),
    )


demands = pytest.mark.parametrize("demand", [uneven(), one_huge_embedding(), dense_model()])


@demands
def test_bytes_of_units_are_those_of_their_pieces(demand: Demand) -> None:
    plan = SparseWindow().plan(demand, context(demand, 0.2))
    units = [unit for units in plan.slices for unit in units]
    table = demand.bytes_of(units)
    for row, unit in enumerate(units):
        for rank, shards in enumerate(demand.shards_by_rank):
            assert (table.full[row, rank], table.frozen[row, rank]) == unit_bytes(unit, shards)


@demands
def test_bytes_of_slices_are_those_of_their_pieces(demand: Demand) -> None:
    plan = SparseWindow().plan(demand, context(demand, 0.2))
    found = demand.slice_bytes(plan)
    for index in range(plan.num_iterations):
        for rank, shards in enumerate(demand.shards_by_rank):
            assert found[index, rank] == sum(piece.num_bytes for piece in Piece.of_slice(plan, index, shards))


@demands
def test_a_window_takes_the_bytes_of_its_aligned_slices(demand: Demand) -> None:
    plan = SparseWindow().plan(demand, context(demand, 0.2))
    assert plan.num_iterations > 3
    for shards in demand.shards_by_rank:
        slices = range(plan.num_iterations)
        assert window_bytes(plan, shards) == sum(slice_bytes(Piece.of_slice(plan, index, shards)) for index in slices)


def test_ranks_with_the_same_bytes_are_one_column() -> None:
    assert one_huge_embedding().operator_bytes.distinct_ranks().full.shape[1] == 1
    table = uneven().operator_bytes
    assert table.distinct_ranks().full.tolist() == table.full.tolist()


def test_a_node_has_three_windows_of_each_rank_and_two_of_each_rank_it_helps() -> None:
    demand = uneven(num_ranks=6)
    plan = SparseWindow().plan(demand, context(demand, 0.4))
    windows = [window_bytes(plan, shards) for shards in demand.shards_by_rank]
    assignment = PeerAssignment.of(["a", "b", "c"], 1)
    assert assignment.peers == ((1,), (2,), (0,))
    nodes = host_bytes(windows, (0, 0, 1, 1, 2, 2), assignment)
    assert nodes[1] == NodeMemory(
        own_bytes=3 * (windows[2] + windows[3]) + 2 * 4096, copies_bytes=2 * (windows[0] + windows[1])
    )
    assert nodes[1].total_bytes == nodes[1].own_bytes + nodes[1].copies_bytes
    assert nodes[1].device_bytes == 0
    assert all(num_bytes % 4096 == 0 for num_bytes in windows)


def layout(world_size: int, **sizes: int) -> Topology:
    topology = Topology(world_size=world_size, **sizes)
    topology.validate()
    return topology


LAYOUTS = {
    "one_rank": layout(1),
    "data_parallel": layout(3),
    "experts": layout(4, expert_model_parallel_size=4),
    "everything": layout(
        16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
    ),
    "virtual": layout(4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
}
MODEL = {"num_layers": 4, "num_moe_experts": 4, "moe_first_dense_layers": 1}


def configured(**parallel: object) -> JobConfig:
    return from_dict({"model": MODEL, "parallel": parallel, "precision": {"params_dtype": "bf16"}})


@pytest.mark.parametrize("topology", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("is_distributed", [True, False])
def test_an_estimate_covers_every_parameter_once(topology: Topology, is_distributed: bool) -> None:
    config = configured(use_distributed_optimizer=is_distributed)
    demand = estimate_demand(config, topology, 1000)
    operators = operators_of(config.model, 1000)
    sizes = {(str(operator.id), 0): operator.num_parameters for operator in operators}
    check_shards(demand.shards_by_rank, sizes)
    num_shards = sum(map(len, demand.shards_by_rank))
    assert demand.operator_bytes.full.sum() == 12 * sum(sizes.values()) + 4 * num_shards
    assert demand.operator_bytes.frozen.sum() == 2 * sum(sizes.values())


@pytest.mark.parametrize("topology", LAYOUTS.values(), ids=list(LAYOUTS))
def test_ranks_of_a_stage_capture_equally_much(topology: Topology) -> None:
    by_rank = estimate_demand(configured(), topology, 1000).operator_bytes.full.sum(axis=0)
    for stage in range(topology.pipeline_model_parallel_size):
        of_stage = by_rank[list(topology.stage_ranks(stage))]
        assert of_stage.max() - of_stage.min() <= 0.01 * of_stage.max()


def test_the_distributed_optimizer_gives_a_rank_few_operators_and_an_even_cut_all() -> None:
    topology = LAYOUTS["data_parallel"]
    counts = [
        Counter(shard.operator for shards in estimate_demand(config, topology, 1000).shards_by_rank for shard in shards)
        for config in (configured(use_distributed_optimizer=True), configured(use_distributed_optimizer=False))
    ]
    assert max(counts[0].values()) <= 3
    assert sum(counts[0].values()) <= len(counts[0]) + 2
    assert set(counts[1].values()) == {3}


def test_a_tied_embedding_is_cut_over_the_first_and_the_last_stage() -> None:
    config = from_dict({"model": {**MODEL, "untie_embeddings_and_output_weights": False}})
    topology = layout(2, pipeline_model_parallel_size=2)
    demand = estimate_demand(config, topology, 1000)
    embedding = operators_of(config.model, 1000)[0]
    check_shards(
        demand.shards_by_rank,
        {(str(operator.id), 0): operator.num_parameters for operator in operators_of(config.model, 1000)},
    )
    by_rank = demand.operator_bytes.full[demand.operators.index(embedding.id)]
    assert by_rank[0] == pytest.approx(by_rank[1], rel=0.01)


def test_experts_with_replicas_are_cut_over_the_stage() -> None:
    placement = {"algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"}, "num_slots_per_rank": 2}
    demand = estimate_demand(from_dict({"model": MODEL, "placement": placement}), layout(3), 1000)
    by_rank = demand.operator_bytes.full.sum(axis=0)
    assert by_rank.max() - by_rank.min() <= 0.01 * by_rank.max()

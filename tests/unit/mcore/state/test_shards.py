"""Tests which rank captures what: every element once, evenly over the ranks that have it, for any ranges."""

import json
import random
from types import SimpleNamespace

import pytest

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.state.operator_view import _cut_shards, _from_record, _PartHolding, _sizes, _to_record
from megatron_ft.operators import Component, check_shards
from megatron_ft.topology import Topology

WEIGHT = Component(name="weight", dtype="bfloat16", item_bytes=2)
MASTER = Component(name="master", dtype="float32", item_bytes=4)
STEP = Component(name="step", dtype="float32", item_bytes=4, per_element=False)
NORM = "decoder.layers.0.input_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def holding(name: str, ranges: list[tuple[int, int]], size: int = 100, part: int = 0) -> _PartHolding:
    return _PartHolding(
        part=(name, part), num_elements=size, ranges=tuple(ranges), full=(MASTER, STEP), frozen=(WEIGHT,)
    )


def ranges_of(by_rank: list[list[_PartHolding]]) -> list[list[tuple[int, int]]]:
    shards = _cut_shards(by_rank, num_layers=2)
    check_shards(shards, _sizes(by_rank))
    return [[(shard.start, shard.stop) for shard in of_rank] for of_rank in shards]


def test_sharded_state_is_captured_where_it_is() -> None:
    """Weights are on every rank and optimizer state is sharded, so frozen weights are divided like the optimizer
    state."""
    by_rank = [[holding(NORM, [(0, 30)])], [holding(NORM, [(30, 100)])], [holding(NORM, [])]]
    assert ranges_of(by_rank) == [[(0, 30)], [(30, 100)], []]


def test_repeated_state_is_cut_evenly() -> None:
    assert ranges_of([[holding(NORM, [(0, 100)])] for _ in range(3)]) == [[(0, 33)], [(33, 66)], [(66, 100)]]


def test_fewer_elements_than_holders() -> None:
    found = ranges_of([[holding(NORM, [(0, 2)], size=2)] for _ in range(5)])
    assert sorted(bounds for of_rank in found for bounds in of_rank) == [(0, 1), (1, 2)]


def test_ranges_that_overlap_in_part() -> None:
    """Two stages share the embedding and divide its state at different positions."""
    by_rank = [
        [holding(EMBEDDING, [(0, 40)])],
        [holding(EMBEDDING, [(40, 100)])],
        [holding(EMBEDDING, [(0, 70)])],
        [holding(EMBEDDING, [(70, 100)])],
    ]
    assert ranges_of(by_rank) == [[(0, 20)], [(40, 55), (70, 85)], [(20, 40), (55, 70)], [(85, 100)]]


def test_parts_of_a_split_parameter_are_of_their_own() -> None:
    by_rank = [[holding(NORM, [(0, 100)], part=part)] for part in (0, 1)]
    assert ranges_of(by_rank) == [[(0, 100)], [(0, 100)]]


def test_state_that_nobody_holds_is_found_out() -> None:
    with pytest.raises(AssertionError, match="not captured"):
        ranges_of([[holding(NORM, [(0, 30)])], [holding(NORM, [(40, 100)])]])


def test_any_cut_captures_everything_once() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        by_rank: list[list[_PartHolding]] = [[] for _ in range(6)]
        for name in (NORM, EMBEDDING):
            for group in ([0, 1, 2], [3, 4], [5])[: rng.randint(1, 3)]:
                size = 97
                edges = [0, *sorted(rng.choices(range(size + 1), k=len(group) - 1)), size]
                for rank, start, stop in zip(group, edges, edges[1:], strict=False):
                    ranges = [(start, stop)] if stop > start else []
                    by_rank[rank].append(holding(name, ranges, size=size))
        ranges_of(by_rank)


def test_holdings_survive_json() -> None:
    other = _PartHolding(part=("x", 3), num_elements=7, ranges=(), full=(MASTER,), frozen=(MASTER,))
    holdings = (holding(NORM, [(0, 30), (50, 60)]), other, holding(EMBEDDING, [], part=1))
    record = json.loads(json.dumps(_to_record(holdings)))
    assert _from_record(record) == holdings
    assert len(record["kinds"]) == 2


def test_a_model_part_without_any_shards_is_named() -> None:
    """Rank 1 has weights of stage 1 and no optimizer state, as after a loss before state copies were made."""
    from megatron_ft.mcore.recovery.replicas import ElasticTrainer

    topology = Topology(world_size=2, pipeline_model_parallel_size=2)
    trainer = SimpleNamespace(
        config=SimpleNamespace(
            parallel=SimpleNamespace(use_distributed_optimizer=True), model=SimpleNamespace(num_layers=2)
        ),
        context=SimpleNamespace(generation=3),
        topology=topology,
    )
    for stated in ([{"sizes": [(0, {"embedding": 4})]}, None], [None, None]):
        with pytest.raises(RecoveryError, match="generation 3 .* no rank has optimizer state of .*pipeline stage 1"):
            ElasticTrainer._shard_move(trainer, None, stated, 4)  # type: ignore[arg-type]

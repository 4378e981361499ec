"""Compares the report on a first placement with values computed by hand."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, ScheduledPlacement, derive_placement
from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import DataError
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.planning.placement.report import PlacementReport, _movable_copies
from megatron_ft.planning.placement.stage import StageRequest, algorithm_of
from megatron_ft.planning.render import _render_placement

EXPERT_PARAMETERS = 3 * 8 * 16
NUM_DENSE = 100
SPREAD = "spread.Spread"


def report(
    *,
    nodes: int = 4,
    algorithm: str = "compact.Compact",
    inputs: JobInputs | None = None,
    parallel: dict[str, Any] | None = None,
    link_bytes_per_second: float | None = None,
    **placement: Any,
) -> PlacementReport:
    """Return the report for 2 layers of 4 experts. ``compact`` places the copies of 2 slots per rank on neighbours."""
    config = config_of(nodes, algorithm, parallel or {}, link_bytes_per_second, placement)
    stages = (parallel or {}).get("pipeline_model_parallel_size", 1)
    return PlacementReport.of(config, inputs or JobInputs(), [NUM_DENSE] * stages)


def config_of(
    nodes: int, algorithm: str, parallel: dict[str, Any], link_bytes_per_second: float | None, placement: dict[str, Any]
) -> JobConfig:
    config = from_dict(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 8,
                "num_attention_heads": 2,
                "num_moe_experts": 4,
                "moe_ffn_hidden_size": 16,
            },
            "launch": {"num_nodes": nodes, "ranks_per_node": 1},
            "parallel": parallel,
            "topology": {"link_bytes_per_second": link_bytes_per_second},
            "placement": {
                "algorithm": {"_target_": f"megatron_ft.planning.placement.{algorithm}"},
                "num_slots_per_rank": 2,
                **placement,
            },
        }
    )
    return derive_placement(config)


def test_bytes_count_each_set_of_weights_once() -> None:
    result = report()
    held = sum(len(set(experts)) for by_rank in result.stages[0].slots for experts in by_rank)
    assert result.expert_weights_bytes == held * EXPERT_PARAMETERS * 4
    assert result.expert_state_bytes == held * EXPERT_PARAMETERS * 8
    assert result.non_expert_state_bytes == NUM_DENSE * 8
    assert (result.expert_copies_bytes, result.non_expert_copies_bytes) == (None, None)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copies_of_state_are_a_number_of_their_own(copies: int) -> None:
    result = report(state_copies=copies)
    assert result.expert_copies_bytes == copies * 2 * 4 * EXPERT_PARAMETERS * 8
    assert result.non_expert_copies_bytes == copies * NUM_DENSE * 8
    assert result.expert_state_bytes == report().expert_state_bytes


def test_without_the_distributed_optimizer_every_rank_keeps_what_is_no_expert() -> None:
    result = report(parallel={"use_distributed_optimizer": False})
    assert result.non_expert_state_bytes == 4 * NUM_DENSE * 8
    assert result.state_survival == result.weights_survival


def test_survival_is_that_of_everything_together() -> None:
    """Sharded state without copies survives no loss, and with two copies any single loss. Weights survive with the
    experts."""
    alone, copied = report(), report(state_copies=2)
    assert [value.num_lost for value in alone.weights_survival] == [1, 2]
    held = [set(domains) for domains in alone.stages[0].all_expert_domains()]
    pairs = [{f"node{a}", f"node{b}"} for a in range(4) for b in range(a)]
    surviving = [pair for pair in pairs if all(domains - pair for domains in held)]
    assert alone.weights_survival[1].probability == len(surviving) / len(pairs)
    assert [value.probability for value in alone.state_survival] == [0.0, 0.0]
    assert copied.state_survival[0].probability == 1.0
    assert copied.weights_survival == alone.weights_survival


def test_stages_are_joint() -> None:
    """Each stage has two ranks with all experts. Any node may be lost, and two nodes if they are of different
    stages."""
    result = report(parallel={"pipeline_model_parallel_size": 2}, algorithm=SPREAD, num_slots_per_rank=4)
    assert [value.probability for value in result.weights_survival] == [1.0, pytest.approx(4 / 6)]


def test_tensor_parallel_parts_have_fewer_holders() -> None:
    """Four ranks have two tensor-parallel parts. Losing ranks 0 and 2 loses one part, although every rank has every
    expert."""
    result = report(parallel={"tensor_model_parallel_size": 2}, algorithm=SPREAD, num_slots_per_rank=4)
    assert result.weights_survival[1].probability == pytest.approx(4 / 6)


def test_a_lowered_minimum_is_said() -> None:
    assert report().notes == ()
    short = report(nodes=3)
    assert short.kept_min_replicas == 1
    assert short.notes == ("placement.min_replicas=2: too few slots; the smallest number of replicas is 1",)


def test_json_holds_the_survival_and_stages_that_a_schedule_can_name() -> None:
    result = report(state_copies=2)
    content = json.loads(json.dumps(result.to_json()))
    assert content["weights_survival"][0]["probability"] == result.weights_survival[0].probability
    script = ScheduledPlacement(path="p.json", stages=tuple(content["stages"]))
    assert report(inputs=JobInputs(schedule={1: script})).stages == result.stages


def test_every_scripted_placement_is_checked() -> None:
    content = report().to_json()["stages"]
    broken = [{**content[0], "ranks": [7, 8, 9, 10]}]
    schedule = {
        1: ScheduledPlacement(path="good.json", stages=tuple(content)),
        9: ScheduledPlacement(path="bad.json", stages=tuple(broken)),
    }
    with pytest.raises(DataError, match=r"placement\.schedule=bad\.json"):
        report(inputs=JobInputs(schedule=schedule))


def test_a_rebalance_is_predicted_from_the_copies_that_may_move() -> None:
    """With 3 slots on 4 ranks, 12 replicas exist in each of 2 layers; 8 of them are base copies, which stay."""
    searched = {"algorithm": "overlap_search.OverlapSearch", "num_slots_per_rank": 3}
    result = report(**searched, link_bytes_per_second=1000.0)
    assert result.most_moved_bytes == 2 * 4 * result.staged_bytes
    assert result.most_received_bytes == 2 * result.staged_bytes
    assert result.rebalance_seconds == result.most_received_bytes / 1000
    assert report(num_slots_per_rank=3).most_moved_bytes == 2 * 12 * result.staged_bytes


def test_base_copies_may_move_if_there_are_no_extra_copies() -> None:
    """With 2 slots on 4 ranks, each of 4 experts has ``min_replicas`` = 2 replicas."""
    exact = report(algorithm="overlap_search.OverlapSearch")
    assert exact.most_moved_bytes == 2 * 8 * exact.staged_bytes and exact.rebalance_seconds is None
    config = config_of(4, "overlap_search.OverlapSearch", {}, None, {})
    held = tuple(tuple(frozenset(slots) for slots in layer) for layer in exact.stages[0].slots)
    moved = []
    for loads in itertools.permutations([8.0, 8.0, 1.0, 1.0]):
        wanted, _ = StageRequest.of_job(config)[0].place(algorithm_of(config), [loads, loads], held)
        moved.append(MigrationPlan.between(wanted, held, exact.staged_bytes).num_bytes)
    assert 0 < max(moved) <= exact.most_moved_bytes


def test_base_copies_may_move_if_their_number_depends_on_loads() -> None:
    config = config_of(4, "overlap_search.OverlapSearch", {}, None, {"num_slots_per_rank": 3})
    (plan,) = report(algorithm="overlap_search.OverlapSearch", num_slots_per_rank=3).stages
    more = replace(algorithm_of(config), survival_share=0.8)
    uneven = replace(plan, slots=tuple(((0, 1, 2), (0, 1, 3), (0, 2, 3), (0, 1, 2)) for _ in plan.slots))
    assert _movable_copies(uneven, more, 2) == [12, 12]
    assert _movable_copies(uneven, algorithm_of(config), 2) == [4, 4]


def test_text_names_what_people_look_for() -> None:
    text = _render_placement(report(state_copies=2), "enough for two")
    parts = ("slots per rank", "2 in each MoE layer: 8 on 4 ranks for 4 experts", "enough for two", "2 copies")
    parts += ("lost failure domains: 1", "because topology.link_bytes_per_second=null")
    for part in parts:
        assert part in text
    assert "rank 3  node3" in text

"""Tests the first placement of a job, made from the loads or the schedule that its configuration names."""

from typing import Any

import numpy as np
import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, ScheduledPlacement, derive_placement
from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.expert_loads import ExpertLoads
from megatron_ft.planning.placement.stage import StageRequest, first_plans, scripted_plans

SPREAD = {"_target_": "megatron_ft.planning.placement.spread.Spread"}


def job(**placement: Any) -> JobConfig:
    """Return a job with two stages of two ranks, each on a separate node. Layers 2 and 4 are MoE layers with 4
    experts."""
    config = from_dict(
        {
            "model": {"num_moe_experts": 4, "moe_layer_freq": 2, "num_layers": 4},
            "parallel": {"pipeline_model_parallel_size": 2},
            "launch": {"num_nodes": 4, "ranks_per_node": 1},
            "placement": {"algorithm": SPREAD, **placement},
        }
    )
    return derive_placement(config)


def loads(tokens: list[list[float]]) -> ExpertLoads:
    return ExpertLoads(source="x.json", iterations=(0,), tokens=np.asarray(tokens)[None, None, :, None, :])


def test_requests_have_the_ranks_and_mixture_layers_of_each_stage() -> None:
    first, second = StageRequest.of_job(job(num_slots_per_rank=3))
    assert (first.ranks, first.layer_numbers) == ((0, 1), (2,))
    assert (second.ranks, second.layer_numbers) == ((2, 3), (4,))
    assert {first.num_slots_per_rank, second.num_slots_per_rank, first.num_domains + 1} == {3}


def test_recorded_loads_reach_their_layers() -> None:
    config = job(num_slots_per_rank=4, min_replicas=1)
    requests = StageRequest.of_job(config)
    even = first_plans(config, requests, JobInputs())
    assert [plan.replica_counts(0) for plan in even] == [(2, 2, 2, 2)] * 2
    skewed = first_plans(config, requests, JobInputs(loads=loads([[5, 1, 1, 1], [1, 1, 1, 5]])))
    assert [plan.replica_counts(0) for plan in skewed] == [(5, 1, 1, 1), (1, 1, 1, 5)]


@pytest.mark.parametrize("tokens", [[[1, 1, 1, 1]], [[1, 1, 1], [1, 1, 1]]])
def test_loads_for_another_model_are_refused(tokens: list[list[float]]) -> None:
    config = job(loads_file="x.json")
    with pytest.raises(ConfigError, match=r"placement\.loads_file=x\.json: must contain 2 MoE layers with 4 experts"):
        first_plans(config, StageRequest.of_job(config), JobInputs(loads=loads(tokens)))


def test_a_script_for_iteration_1_is_the_first_placement() -> None:
    config = job(num_slots_per_rank=4, min_replicas=1)
    requests = StageRequest.of_job(config)
    skewed = first_plans(config, requests, JobInputs(loads=loads([[5, 1, 1, 1], [1, 1, 1, 5]])))
    script = ScheduledPlacement(path="p.json", stages=tuple(plan.to_json() for plan in skewed))
    assert first_plans(config, requests, JobInputs(schedule={1: script})) == skewed
    assert first_plans(config, requests, JobInputs(schedule={2: script})) != skewed


@pytest.mark.parametrize(
    ("stage", "changes", "says"),
    [
        (0, {"slots": [[[0, 1, 2], [0, 1, 2]]]}, "stage 0: layer 2: expert=3: must have at least one slot"),
        (1, {"ranks": [0, 1]}, r"stage 1: ranks=\[0, 1\]: must be \[2, 3\]"),
        (1, {"layer_numbers": [2]}, r"stage 1: layer_numbers=\[2\]: must be \[4\]"),
        (0, {"num_slots_per_rank": 9}, "stage 0: num_slots_per_rank=9: must be at most placement.num_slots_per_rank=4"),
        (0, {"surplus": 1}, "stage 0: must have the format of a placement plan"),
        (0, {"slots": 3}, "stage 0: must have the format of a placement plan"),
    ],
)
def test_scripts_that_do_not_fit_are_refused_by_file(stage: int, changes: dict[str, Any], says: str) -> None:
    config = job(num_slots_per_rank=4)
    requests = StageRequest.of_job(config)
    stages = [plan.to_json() for plan in first_plans(config, requests, JobInputs())]
    stages[stage] |= changes
    with pytest.raises(DataError, match=rf"placement\.schedule=p\.json: {says}"):
        scripted_plans(requests, ScheduledPlacement(path="p.json", stages=tuple(stages)))


def test_scripts_name_every_stage() -> None:
    with pytest.raises(DataError, match="number of stages=0: must be 2, the number of pipeline stages"):
        scripted_plans(StageRequest.of_job(job()), ScheduledPlacement(path="p.json", stages=()))

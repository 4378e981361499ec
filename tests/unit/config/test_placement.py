"""Tests keys of the placement: which values are refused by name, and which values are derived."""

from typing import Any

import pytest

from megatron_ft.config.checks.placement import check_placement
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import derive_placement
from megatron_ft.config.serialize import build_policy, from_dict
from megatron_ft.errors import ConfigError
from megatron_ft.planning.compilers import kernels_of
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.stage import algorithm_of
from megatron_ft.planning.placement.survival import SurvivalObjective

FOLDER = "megatron_ft.planning.placement"
SEARCH = {"_target_": f"{FOLDER}.overlap_search.OverlapSearch"}


def job(changes: dict[str, Any]) -> JobConfig:
    """Return three nodes of two ranks with eight experts and replica slots, with dotted keys changed."""
    values: dict[str, Any] = {
        "model": {"num_moe_experts": 8, "num_layers": 6},
        "launch": {"num_nodes": 3, "ranks_per_node": 2},
        "placement": {"algorithm": SEARCH},
    }
    for key, value in changes.items():
        group, name = key.split(".")
        values.setdefault(group, {})[name] = value
    return from_dict(values)


SHARDS: dict[str, Any] = {
    "placement.algorithm": None,
    "placement.state_copies": 2,
    "parallel.use_distributed_optimizer": True,
    "recovery.keep_layout": True,
    "nodes.restart_lost_nodes": True,
}
"""Copies of optimizer shards in a job without expert replicas."""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"placement.dispatch_backend": "fortran"}, "placement.dispatch_backend"),
    ({"placement.dispatch_backend": "cuda", "training.device": "cpu"}, "placement.dispatch_backend"),
    ({"placement.dispatch_backend": "cpp", "training.device": "cuda"}, "placement.dispatch_backend"),
    ({"placement.shares": "fair"}, "placement.shares"),
    ({"model.num_moe_experts": None}, "placement.algorithm"),
    ({"parallel.expert_model_parallel_size": 2}, "parallel.expert_model_parallel_size"),
    ({"parallel.expert_model_parallel_size": 6}, "parallel.expert_model_parallel_size"),
    ({"parallel.expert_tensor_parallel_size": 2}, "parallel.expert_tensor_parallel_size"),
    ({"placement.num_slots_per_rank": 1}, "placement.num_slots_per_rank"),
    ({"placement.num_slots_per_rank": 0}, "placement.num_slots_per_rank"),
    ({"placement.num_slots_per_rank": -3}, "placement.num_slots_per_rank"),
    ({"placement.min_replicas": 4}, "placement.min_replicas"),
    ({"placement.min_replicas": 0}, "placement.min_replicas"),
    ({"placement.state_copies": 4}, "placement.state_copies"),
    ({"placement.state_copies": 0}, "placement.state_copies"),
    ({"placement.min_replicas": 3, "topology.failure_domains": ["a", "a", "b"]}, "placement.min_replicas"),
    (
        {"parallel.pipeline_model_parallel_size": 3, "topology.failure_domains": ["a", "b", "c"]},
        "placement.min_replicas",
    ),
    ({"placement.rebalance_interval_iterations": -1}, "placement.rebalance_interval_iterations"),
    ({"placement.rebalance_interval_iterations": 5, "placement.schedule": ["3:x.json"]}, "placement.schedule"),
    ({"placement.load_smoothing": 1.0}, "placement.load_smoothing"),
    ({"placement.load_smoothing": -0.1}, "placement.load_smoothing"),
    ({"placement.load_smoothing": float("nan")}, "placement.load_smoothing"),
    ({"placement.rebalance_min_gain": 1.0}, "placement.rebalance_min_gain"),
    ({"placement.algorithm": None, "placement.num_slots_per_rank": 3}, "placement.num_slots_per_rank"),
    ({"placement.algorithm": None, "placement.rebalance_interval_iterations": 5}, "placement.rebalance_interval"),
    ({"placement.algorithm": None, "placement.schedule": ["3:x.json"]}, "placement.schedule"),
    ({"placement.algorithm": None, "placement.loads_file": "x.json"}, "placement.loads_file"),
    ({"placement.algorithm": None, "placement.state_copies": 2}, "placement.state_copies"),
    ({**SHARDS, "placement.state_copies": 4}, "placement.state_copies"),
    ({**SHARDS, "placement.state_copies": 0}, "placement.state_copies"),
    ({**SHARDS, "recovery.keep_layout": False}, "placement.state_copies"),
]


@pytest.mark.parametrize(("changes", "key"), REFUSED, ids=[f"{key}-{n}" for n, (_, key) in enumerate(REFUSED)])
def test_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_placement(job(changes))
    assert str(refusal.value).startswith(key)


@pytest.mark.parametrize("changes", [{}, {"placement.min_replicas": 3}, {"placement.num_slots_per_rank": 2}])
def test_accepted(changes: dict[str, Any]) -> None:
    check_placement(job(changes))


@pytest.mark.parametrize(
    ("changes", "expert_ranks", "slots"),
    [
        ({}, 6, 3),
        ({"placement.num_slots_per_rank": 5}, 6, 5),
        ({"parallel.pipeline_model_parallel_size": 2}, 3, 6),
        ({"parallel.tensor_model_parallel_size": 2}, 6, 3),
        ({"placement.min_replicas": 3}, 6, 4),
        ({"launch.num_nodes": 1, "launch.ranks_per_node": 1}, 1, 8),
    ],
)
def test_derived_from_the_ranks_of_a_stage(changes: dict[str, Any], expert_ranks: int, slots: int) -> None:
    derived = derive_placement(job(changes))
    assert derived.parallel.expert_model_parallel_size == expert_ranks
    assert derived.placement.num_slots_per_rank == slots


def test_nothing_is_derived_without_replica_slots() -> None:
    plain = job({"placement.algorithm": None})
    assert derive_placement(plain) is plain


def test_deriving_leaves_the_given_configuration_alone() -> None:
    given = job({})
    derive_placement(given)
    assert (given.parallel.expert_model_parallel_size, given.placement.num_slots_per_rank) == (1, None)


def test_builds_the_policy_that_is_named() -> None:
    assert build_policy("key", {**SEARCH, "seed": 7}) == OverlapSearch(seed=7)


@pytest.mark.parametrize("target", [{}, {"_target_": f"{FOLDER}.survival.SurvivalObjective"}])
def test_builds_the_objective_inside_a_policy(target: dict[str, str]) -> None:
    built = build_policy("key", {**SEARCH, "objective": {**target, "lost_weights": [0.5, 0.25]}})
    assert built == OverlapSearch(objective=SurvivalObjective(lost_weights=(0.5, 0.25)))
    assert hash(built) == hash(OverlapSearch(objective=SurvivalObjective(lost_weights=(0.5, 0.25))))


@pytest.mark.parametrize(
    ("spec", "key", "output"),
    [
        ({}, "key._target_", "dotted path"),
        ({"_target_": 3}, "key._target_", "dotted path"),
        ({"_target_": "OverlapSearch"}, "key._target_", "dotted path"),
        ({"_target_": f"{FOLDER}.nowhere.Search"}, "key._target_", "importable"),
        ({"_target_": f"{FOLDER}.overlap_search.Nothing"}, "key._target_", "importable"),
        ({"_target_": "os.system"}, "key._target_", "frozen dataclass"),
        ({"_target_": "pathlib.Path"}, "key._target_", "frozen dataclass"),
        ({"_target_": "megatron_ft.config.job.JobConfig"}, "key._target_", "frozen dataclass"),
        ({**SEARCH, "sed": 7}, "key.sed", "must be one of the fields of OverlapSearch"),
        (
            {**SEARCH, "objective": {"weights": [1]}},
            "key.objective.weights",
            "must be one of the fields of SurvivalObjective",
        ),
        ({"_target_": f"{FOLDER}.survival.Survival"}, "key.num_lost", "must be given"),
        ({"_target_": ".relative"}, "key._target_", "dotted path"),
        ({"_target_": "..relative.Policy"}, "key._target_", "dotted path"),
    ],
)
def test_other_policies_are_refused(spec: dict[str, Any], key: str, output: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_policy("key", spec)
    assert str(refusal.value).startswith(key) and output in str(refusal.value)


def test_a_policy_of_another_kind_is_no_algorithm() -> None:
    other = job({"placement.algorithm": {"_target_": f"{FOLDER}.survival.SurvivalObjective"}})
    with pytest.raises(ConfigError, match=r"placement\.algorithm\._target_=.* must be a class with a method 'place'"):
        algorithm_of(other)


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, "cpu", "cpp"),
        ({}, "cuda", "cuda"),
        ({"placement.dispatch_backend": "reference"}, "cuda", ""),
        ({"placement.algorithm": None}, "cpu", ""),
        ({"placement.algorithm": None, "placement.dispatch_backend": "cpp"}, "cpu", ""),
    ],
)
def test_only_jobs_with_replicas_build_kernels(changes: dict[str, Any], device: str, expected: str) -> None:
    found = job(changes)
    assert found.placement.kernels_on(device) == expected
    assert kernels_of(found, device) == ({"placement.dispatch_backend": expected} if expected else {})

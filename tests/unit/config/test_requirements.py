"""Tests the table of requirements: a check refuses the same key that planning names."""

import re
from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.requirements import KEPT_LAYOUT, REPLICAS, Requirement, value_of
from megatron_ft.config.serialize import from_dict
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError
from megatron_ft.planning.recovery.living_state import why_no_replicas

SEARCH = {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}
VIOLATIONS: dict[str, Any] = {
    "launch.mode": "torchrun",
    "launch.master_port": 20001,
    "parallel.context_parallel_size": 2,
    "parallel.use_distributed_optimizer": True,
    "placement.schedule": ["3:plan.json"],
    "placement.state_copies": 2,
    "placement.algorithm": None,
    "recovery.keep_processes": False,
    "training.device": "cuda",
}


def job(changes: dict[str, Any]) -> JobConfig:
    """Return three nodes of two ranks that continue from replicas, with dotted keys changed."""
    values: dict[str, Any] = {
        "launch": {"num_nodes": 3, "ranks_per_node": 2},
        "recovery": {"min_nodes": 1},
        "parallel": {"use_distributed_optimizer": False},
        "placement": {"algorithm": SEARCH, "num_slots_per_rank": 4},
        "model": {"num_layers": 6},
    }
    for key, value in changes.items():
        group, name = key.split(".")
        values.setdefault(group, {})[name] = value
    return from_dict(values)


def test_a_job_that_meets_all_requirements_is_accepted_and_can_use_its_replicas() -> None:
    config = job({})
    validate(config)
    assert Requirement.unmet(config, REPLICAS) == [] and why_no_replicas(config) == ""


@pytest.mark.parametrize("requirement", REPLICAS, ids=lambda requirement: requirement.key)
def test_checks_and_planning_name_the_same_key(requirement: Requirement) -> None:
    key = requirement.key
    config = job({key: VIOLATIONS[key]})
    assert Requirement.unmet(config, REPLICAS) == [requirement]
    assert why_no_replicas(config).startswith(f"{key}=")
    if key != "parallel.context_parallel_size":  # refused earlier: it needs Transformer Engine
        if key == "placement.algorithm":
            config.placement.num_slots_per_rank = None
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}=.*must be .* with recovery\.min_nodes=1"):
            validate(config)


def test_every_requirement_is_of_a_key_that_exists_and_says_what_it_must_be() -> None:
    for requirement in (*REPLICAS, *KEPT_LAYOUT):
        assert value_of(JobConfig(), requirement.key) is not ...
        assert re.match(
            r"must be \S+.* with recovery\.min_nodes=1(: \S.*)?$", requirement.constraint("recovery.min_nodes=1")
        )


def test_all_that_is_missing_is_named_in_one_message() -> None:
    changes = {"launch.master_port": 20001, "parallel.use_distributed_optimizer": True}
    with pytest.raises(ConfigError) as caught:
        validate(job({**changes, "training.device": "cuda"}))
    assert str(caught.value) == (
        "launch.master_port=20001: must be 0 with recovery.min_nodes=1: "
        "each change of the nodes needs a rendezvous store on a new port, so the port cannot be fixed; "
        "recovery.min_nodes=1 also requires: "
        "training.device=cuda must be cpu, "
        "parallel.use_distributed_optimizer=true must be false (or placement.state_copies at least 2)"
    )


def test_spares_without_replicas_name_the_other_way_to_use_them() -> None:
    changes = {"recovery.min_nodes": None, "nodes.num_spare_nodes": 1, "launch.master_port": 20001}
    with pytest.raises(
        ConfigError, match=r"must be 0 with nodes\.num_spare_nodes=1: .*; .* set recovery\.keep_layout=true$"
    ):
        validate(job(changes))


def test_a_sharded_optimizer_needs_copies_of_its_shards() -> None:
    """One message names both ways out. Two copies are enough, one is not."""
    sharded = {"parallel.use_distributed_optimizer": True}
    expected = (
        "parallel.use_distributed_optimizer=true: must be false (or placement.state_copies at least 2) with "
        "recovery.min_nodes=1: only one rank has each shard of the optimizer state, unless other nodes keep copies of "
        "it"
    )
    for changes in (sharded, {**sharded, "placement.state_copies": 1}):
        with pytest.raises(ConfigError) as caught:
            validate(job(changes))
        assert str(caught.value) == expected
        assert why_no_replicas(job(changes)) == "parallel.use_distributed_optimizer=true"
    copied = job({**sharded, "placement.state_copies": 2})
    validate(copied)
    assert why_no_replicas(copied) == ""


def test_copies_that_no_recovery_uses_are_refused() -> None:
    """Without the distributed optimizer every rank has the whole state, so no recovery reads a copy."""
    with pytest.raises(ConfigError, match=r"^placement\.state_copies=2: must be null .*no recovery uses these copies$"):
        validate(job({"placement.state_copies": 2}))

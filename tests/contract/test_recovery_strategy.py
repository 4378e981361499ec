"""Tests the contract of recovery strategies: each row computes a cost, or declines with a reason, for any loss.

A strategy has a file in ``conf/recovery/`` with its name, which chooses only this strategy.
"""

import dataclasses
import importlib.util
import json
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_ft.config.checks.recovery
import megatron_ft.planning.recovery.costs
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, derive_placement
from megatron_ft.config.requirements import REQUIREMENTS, Requirement, value_of
from megatron_ft.config.serialize import from_dict
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.stage import StageRequest, first_plans
from megatron_ft.planning.recovery.costs import STRATEGIES, cost_of_loss
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.strategy import Cost, Loss, Stored, Strategy
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.planning.state.declined import Declined
from megatron_ft.testing.jobs import REPOSITORY

ADDED = '''"""Recovery strategy ``cold_copy``: all ranks load a copy of the state from another cluster."""

from dataclasses import dataclass

from megatron_ft.planning.recovery.strategy import Cost
from megatron_ft.planning.state.declined import Declined


@dataclass(frozen=True, slots=True)
class ColdCopy:
    name = "cold_copy"
    requirements = ()
    reads = ()

    def cost(self, loss, facts):
        if loss.ends_job:
            return Declined(strategy=self.name, reason="the copy ends with the job")
        return Cost.of_restart(self.name, loss, facts, 1)
'''
"""File of a strategy that a test adds."""
NUM_NODES = 4
MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 8}
WINDOWS = {"_target_": "megatron_ft.planning.snapshot.dense.DenseInterval", "interval_iterations": 3}
MEASURED = {"bandwidth_bytes_per_second": 1e12, "iteration_seconds": 1.0, "num_peer_copies": 1}
SPREAD = {"algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"}, "num_slots_per_rank": 4}
JOBS: dict[str, dict[str, Any]] = {
    "default": {},
    "saving": {"checkpoint": {"save_interval_iterations": 10}, "recovery": {"max_restarts": 1}},
    "windows": {"snapshot": {"policy": WINDOWS, **MEASURED}, "recovery": {"max_restarts": 1}},
    "replicas": {
        "placement": {**SPREAD, "min_replicas": 2},
        "parallel": {"use_distributed_optimizer": False},
        "recovery": {"min_nodes": 2},
    },
    "kept layout": {
        "snapshot": {"policy": WINDOWS, "persist_interval_windows": 2, **MEASURED},
        "recovery": {"keep_layout": True},
        "nodes": {"num_spare_nodes": 1},
        "parallel": {"pipeline_model_parallel_size": 2},
    },
}
LOSSES = st.fixed_dictionaries(
    {
        "nodes": st.sets(st.integers(0, NUM_NODES - 1), min_size=1),
        "is_gone": st.booleans(),
        "stored": st.none()
        | st.builds(
            Stored,
            iteration=st.integers(30, 40),
            memory_start=st.none() | st.integers(20, 30),
            persisted_start=st.none() | st.integers(10, 20),
            checkpoint=st.none() | st.integers(1, 30),
        ),
    }
)
rows = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)


@cache
def facts_of(job: str) -> RecoveryFacts:
    launch = {"num_nodes": NUM_NODES, "ranks_per_node": 1}
    config: JobConfig = derive_placement(from_dict({"model": MODEL, "launch": launch, **JOBS[job]}))
    plans = []
    if config.placement.algorithm is not None:
        plans = first_plans(config, StageRequest.of_job(config), JobInputs())
    return RecoveryFacts.of(config, plans, SnapshotReport.of(config, 257))


@rows
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("is_running", [True, False])
@settings(max_examples=40, deadline=None)
@given(about=LOSSES)
def test_a_strategy_answers_for_every_loss(
    strategy: Strategy, job: str, is_running: bool, about: dict[str, Any]
) -> None:
    facts = dataclasses.replace(facts_of(job), is_running=is_running)
    loss = Loss.of(facts, **about)
    found = strategy.cost(loss, facts)
    assert found == strategy.cost(loss, facts)
    assert found.strategy == strategy.name
    if isinstance(found, Declined):
        assert found.reason and "\n" not in found.summary() and not found.reason.endswith(".")
        return
    found.validate()
    assert json.loads(json.dumps(found.to_json()))["strategy"] == strategy.name
    assert (found.lost_nodes, found.is_gone) == (loss.nodes, loss.is_gone)
    assert (found.seconds is None) == bool(found.why_no_seconds)
    assert found.max_iterations is None or 0 <= found.max_iterations <= facts.config.training.train_iterations
    # A window that the run has saved can be loaded, even if the job captures no windows any more.
    if loss.stored is None:
        assert not Requirement.unmet(facts.config, strategy.requirements), "it serves although a requirement is unmet"


@rows
def test_a_strategy_serves_some_loss_of_some_job(strategy: Strategy) -> None:
    """Otherwise the test above would only see reasons."""
    losses = [{"nodes": [1], "is_gone": True}, {"nodes": range(NUM_NODES), "is_gone": False}]
    found = [strategy.cost(Loss.of(facts_of(job), **about), facts_of(job)) for job in JOBS for about in losses]
    assert any(isinstance(cost, Cost) for cost in found)


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_strategy_has_an_option_that_chooses_only_this_one(name: str) -> None:
    chosen = yaml.safe_load((REPOSITORY / "conf" / "recovery" / f"{name}.yaml").read_text())
    assert chosen["strategies"] == [name]
    others = {other.name for other in STRATEGIES if other.name not in (name, "start_over")}
    for job in JOBS:
        facts = facts_of(job)
        recovery = dataclasses.replace(facts.config.recovery, strategies=[name])
        facts = dataclasses.replace(facts, config=dataclasses.replace(facts.config, recovery=recovery))
        for is_gone in (True, False):
            cost = cost_of_loss(facts, [1], is_gone=is_gone)
            assert cost.strategy not in others or not cost.is_automatic


@rows
def test_a_strategy_is_frozen_and_its_requirements_name_keys(strategy: Strategy) -> None:
    assert dataclasses.is_dataclass(strategy) and type(strategy).__dataclass_params__.frozen  # type: ignore[attr-defined]
    for requirement in strategy.requirements:
        value_of(JobConfig(), requirement.key)


@rows
@pytest.mark.parametrize("kind", ["persisted", "checkpoint"])
def test_a_strategy_loads_only_the_kinds_of_state_that_it_names(strategy: Strategy, kind: str) -> None:
    """All processes have ended, and the only state that is left is of one kind."""
    facts = facts_of("kept layout")
    saved = {"persisted": {"persisted_start": 28}, "checkpoint": {"checkpoint": 28}}[kind]
    loss = Loss.of(facts, facts.nodes, is_gone=False, ends_job=True, stored=Stored(iteration=30, **saved))
    found = strategy.cost(loss, facts)
    assert isinstance(found, Cost) == (kind in strategy.reads or strategy.name == "start_over")


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Strategy:
    """Add a strategy as CONTRIBUTING.md describes: a file, its requirements, and its place in the order."""
    file = tmp_path / "cold_copy.py"
    file.write_text(ADDED)
    spec = importlib.util.spec_from_file_location("cold_copy", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    strategy: Strategy = module.ColdCopy()
    requirements = MappingProxyType({**REQUIREMENTS, strategy.name: strategy.requirements})
    monkeypatch.setattr(megatron_ft.config.checks.recovery, "REQUIREMENTS", requirements)
    monkeypatch.setattr(megatron_ft.planning.recovery.costs, "STRATEGIES", (*STRATEGIES[:-1], strategy, STRATEGIES[-1]))
    return strategy


def test_an_added_strategy_fulfils_the_contract(added: Strategy) -> None:
    for job in JOBS:
        test_a_strategy_answers_for_every_loss(strategy=added, job=job, is_running=True)
    test_a_strategy_serves_some_loss_of_some_job(added)
    test_a_strategy_is_frozen_and_its_requirements_name_keys(added)


def test_an_added_strategy_is_chosen_by_its_file_in_conf(
    added: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = tmp_path / "cold_copy.yaml"
    option.write_text("strategies: [cold_copy]\n")
    default = facts_of("default")
    recovery = dataclasses.replace(default.config.recovery, **yaml.safe_load(option.read_text()))
    config = dataclasses.replace(default.config, recovery=recovery)
    validate(config)
    facts = dataclasses.replace(default, config=config, is_running=True)
    cost = cost_of_loss(facts, [1], is_gone=False)
    assert (cost.strategy, cost.max_iterations) == ("cold_copy", 1)
    ended = cost_of_loss(facts, range(NUM_NODES), is_gone=False, ends_job=True)
    assert ended.strategy == "start_over"
    assert "cold_copy: the copy ends with the job" in [reason.summary() for reason in ended.declined]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="cold_copy"):
        validate(config)

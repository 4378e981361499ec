"""Keeps the placement of a run: where it starts, what the loads become, when it changes.

Loads are the same on every rank (they are reduced over the job), plans are pure functions of them, so all ranks
agree on every plan of every stage without a word.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.config.policy import build_policy
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.expert_loads import read_expert_loads
from megatron_ft.mcore.model.transformer_config import moe_layer_pattern
from megatron_ft.mcore.moe.replicas import Replicas
from megatron_ft.planning.cost.memory import expert_state_bytes
from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.migration import MigrationPlan, holdings, plan_migration, remap
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.rebalance import RebalancePolicy, imbalance, smooth
from megatron_ft.planning.placement.stage import StageRequest, place_stage
from megatron_ft.runtime.dispatch.backend import DispatchBackend, open_backend
from megatron_ft.topology import Cluster, Topology

Loads = list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A placement that takes over, stage by stage."""

    migrations: tuple[MigrationPlan, ...]
    reason: str
    gain: float
    imbalance_before: float
    imbalance_after: float

    @property
    def moved_bytes(self) -> int:
        """Bytes over all stages."""
        return sum(migration.num_bytes for migration in self.migrations)


class PlacementKeeper:
    """Plans of all stages of a job, and the loads they rest on.

    Args:
        stage: pipeline stage of this rank.
    """

    def __init__(self, config: JobConfig, *, world_size: int, stage: int) -> None:
        self._config = config
        self._stage = stage
        self._algorithm: PlacementAlgorithm = build_policy("placement.algorithm", config.placement.algorithm or {})
        self._requests = stage_requests(config, world_size)
        self._backend: DispatchBackend = open_backend(config.placement.dispatch_backend)
        self._scripted = _read_schedule(config.placement.schedule)
        self._policy = RebalancePolicy(
            interval_iterations=config.placement.rebalance_interval_iterations,
            min_gain=config.placement.rebalance_min_gain,
            bytes_per_saved_token=config.placement.rebalance_bytes_per_token,
        )
        self.loads: list[Loads] | None = None
        """Smoothed tokens per stage, layer and expert; None until the first are seen."""
        self.plans = self._first_plans()

    def replicas(self) -> Replicas:
        """What this rank's model is built with."""
        return Replicas(plan=self.plans[self._stage], backend=self._backend)

    @property
    def wants_loads(self) -> bool:
        """Whether every iteration's loads are needed."""
        return self._policy.interval_iterations > 0

    def observe(self, load: torch.Tensor) -> None:
        """Take in the tokens per expert of one iteration: int64 [num_layers, num_moe_experts] over the job."""
        rows = load.tolist()
        weight = self._config.placement.load_smoothing
        newest = [[rows[number - 1] for number in request.layer_numbers] for request in self._requests]
        previous: Sequence[Loads | None] = self.loads or [None] * len(newest)
        self.loads = [smooth(old, new, weight) for old, new in zip(previous, newest, strict=True)]

    def change_before(self, iteration: int) -> Change | None:
        """The placement that takes over before ``iteration``, if one does: scripted, or planned because it pays."""
        if iteration in self._scripted:
            plans = _read_plans(self._scripted[iteration])
            return self._change([self._migration(stage, plan) for stage, plan in enumerate(plans)], "scripted", 0.0)
        if self.loads is None or not self._policy.due(iteration - 1):
            return None
        migrations = [self._replan(stage) for stage in range(len(self.plans))]
        verdicts = [
            self._policy.judge(plan, migration, loads)
            for plan, migration, loads in zip(self.plans, migrations, self.loads, strict=True)
        ]
        if not any(verdict.pays for verdict in verdicts):
            return None
        kept = [
            migration if verdict.pays else self._migration(stage, self.plans[stage])
            for stage, (migration, verdict) in enumerate(zip(migrations, verdicts, strict=True))
        ]
        best = max(verdicts, key=lambda verdict: verdict.gain)
        return self._change(kept, best.reason, best.gain)

    def propose(self) -> Change:
        """The placement that present loads ask for, whether it pays or not."""
        return self._change([self._replan(stage) for stage in range(len(self.plans))], "asked for", 0.0)

    def adopt(self, change: Change) -> MigrationPlan:
        """Put ``change`` in force; the part that this rank's stage carries out."""
        self.plans = [migration.placement for migration in change.migrations]
        return change.migrations[self._stage]

    def to_json(self) -> dict[str, Any]:
        """Plans and loads, for checkpoints and for a scripted history."""
        return {"stages": [plan.to_json() for plan in self.plans], "loads": self.loads}

    def write(self, path: Path) -> None:
        """Keep the plans in force as a file that ``placement.schedule`` can name."""
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(self.to_json()))

    def restore(self, content: dict[str, Any] | None) -> None:
        """Go on from ``to_json``; on other ranks than it was made for, only the loads are taken over.

        None, from a run without replicas, changes nothing.
        """
        if content is None:
            return
        self.loads = content["loads"]
        plans = [PlacementPlan.from_json(plan) for plan in content["stages"]]
        if [plan.ranks for plan in plans] == [request.ranks for request in self._requests]:
            self.plans = plans
        elif self.loads is not None and len(self.loads) == len(self._requests):
            self.plans = [self._place(stage, loads) for stage, loads in enumerate(self.loads)]

    # -- parts --------------------------------------------------------------------------------------------

    def _first_plans(self) -> list[PlacementPlan]:
        if 1 in self._scripted:
            return _read_plans(self._scripted[1])
        path = self._config.placement.loads_file
        recorded = None if path is None else read_expert_loads(Path(path)).per_layer().tolist()
        return [
            self._place(stage, self._first_loads(request, recorded)) for stage, request in enumerate(self._requests)
        ]

    def _first_loads(self, request: StageRequest, recorded: Loads | None) -> Loads:
        if recorded is None:
            return [[1.0] * request.num_experts for _ in request.layer_numbers]
        numbers = [number for number, mixture in enumerate(moe_layer_pattern(self._config.model), 1) if mixture]
        by_layer = dict(zip(numbers, recorded, strict=False))
        for number in request.layer_numbers:
            if len(by_layer.get(number, ())) != request.num_experts:
                raise ConfigError.of(
                    "placement.loads_file",
                    self._config.placement.loads_file,
                    f"must have {request.num_experts} loads for each of {len(numbers)} mixture layers",
                )
        return [by_layer[number] for number in request.layer_numbers]

    def _place(self, stage: int, loads: Loads) -> PlacementPlan:
        plan, _ = place_stage(self._requests[stage], self._algorithm, loads)
        return plan

    def _replan(self, stage: int) -> MigrationPlan:
        assert self.loads is not None, "plans are made from loads"
        wanted = self._place(stage, self.loads[stage])
        return self._migration(stage, remap(wanted, holdings(self.plans[stage])))

    def _migration(self, stage: int, plan: PlacementPlan) -> MigrationPlan:
        return plan_migration(plan, holdings(self.plans[stage]), expert_state_bytes(self._config))

    def _change(self, migrations: Sequence[MigrationPlan], reason: str, gain: float) -> Change:
        loads = self.loads
        before = after = math.nan
        if loads is not None:
            before = max(imbalance(plan, of_stage) for plan, of_stage in zip(self.plans, loads, strict=True))
            after = max(imbalance(m.placement, of_stage) for m, of_stage in zip(migrations, loads, strict=True))
        return Change(
            migrations=tuple(migrations), reason=reason, gain=gain, imbalance_before=before, imbalance_after=after
        )


def stage_requests(config: JobConfig, world_size: int) -> list[StageRequest]:
    """What every stage's plans must fit: its ranks, its mixture layers, its slots."""
    topology = Topology.of(config.parallel, world_size)
    launch, model = config.launch, config.model
    cluster = Cluster.of(launch.num_nodes, launch.ranks_per_node, launch.failure_domains)
    pattern = moe_layer_pattern(model)
    requests = []
    for stage in range(topology.pipeline_model_parallel_size):
        ranks = tuple(topology.stage_ranks(stage))
        layers = topology.stage_layers(model.num_layers, stage)
        requests.append(
            StageRequest(
                cluster=cluster,
                ranks=ranks,
                layer_numbers=tuple(number for number in layers if pattern[number - 1]),
                num_experts=model.num_moe_experts or 0,
                num_slots_per_rank=config.placement.num_slots_per_rank or 0,
                min_replicas=config.placement.min_replicas,
            )
        )
    return requests


def _read_schedule(entries: Sequence[str]) -> dict[int, Path]:
    schedule = {}
    for entry in entries:
        number, found, path = entry.partition(":")
        if not found or not number.isdecimal() or int(number) < 1:
            raise ConfigError.of("placement.schedule", entry, "must be ITERATION:FILE, iterations counted from 1")
        schedule[int(number)] = Path(path)
    return schedule


def _read_plans(path: Path) -> list[PlacementPlan]:
    try:
        return [PlacementPlan.from_json(plan) for plan in json.loads(path.read_text())["stages"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"placement.schedule={path}: must be a readable placement ({type(error).__name__}: {error})"
        ) from None

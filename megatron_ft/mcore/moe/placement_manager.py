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

from megatron_ft.config.inputs import JobInputs, read_first_loads, read_schedule
from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.device.install import resolve_device
from megatron_ft.mcore.moe.replicas import Replicas
from megatron_ft.operators import operators_of
from megatron_ft.planning.cost.memory import expert_state_bytes
from megatron_ft.planning.cost.parameters import parameters_of_stage
from megatron_ft.planning.placement.copies import StateCopyPlan
from megatron_ft.planning.placement.layout import Holdings
from megatron_ft.planning.placement.migration import MigrationPlan, holdings, plan_migration, remap
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.rebalance import RebalancePolicy, imbalance, smooth
from megatron_ft.planning.placement.report import plan_state_copies
from megatron_ft.planning.placement.stage import (
    algorithm_of,
    first_loads,
    first_plans,
    fits,
    place_stage,
    scripted_plans,
    stage_requests,
)
from megatron_ft.planning.placement.survival import single_loss_survival
from megatron_ft.planning.recovery.replicas import Declined, plan_drain, plan_replicas
from megatron_ft.runtime.dispatch.backend import DispatchBackend, open_backend
from megatron_ft.topology import Topology

Loads = Sequence[Sequence[float]]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementState:
    """Placement and loads that pass to the next membership, and from a checkpoint to a restart."""

    plans: list[PlacementPlan]
    """Plan of each stage, in force."""
    loads: list[Loads] | None
    """Smoothed tokens per stage, layer and expert; None until the first are seen."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"stages": [plan.to_json() for plan in self.plans], "loads": self.loads}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PlacementState":
        """Inverse of ``to_json``."""
        plans = [PlacementPlan.from_json(plan) for plan in content["stages"]]
        return cls(plans=plans, loads=content["loads"])


def open_dispatch(config: JobConfig) -> DispatchBackend:
    """Open the dispatch backend of a job with expert replicas; builds its kernels at the first use.

    Raises:
        SoftwareError: the kernels cannot be built or run here.
    """
    backend = config.placement.backend_on(resolve_device(config.training.device))
    return open_backend(backend, config.placement.shares)


class PlacementManager:
    """Plans of all stages of a job, and the loads they rest on.

    Args:
        stage: pipeline stage of this rank.
        before: that of the membership before, whose loads are continued; None makes plans like a new run.
    """

    def __init__(self, config: JobConfig, *, world_size: int, stage: int, before: PlacementState | None = None) -> None:
        self._config = config
        self._stage = stage
        self._algorithm = algorithm_of(config)
        self._requests = stage_requests(config, world_size)
        self._backend = open_dispatch(config)
        self._inputs = JobInputs(loads=read_first_loads(config), schedule=read_schedule(config))
        self._policy = RebalancePolicy(
            interval_iterations=config.placement.rebalance_interval_iterations,
            min_gain=config.placement.rebalance_min_gain,
            bytes_per_saved_token=config.placement.rebalance_bytes_per_token,
            shares=config.placement.shares,
        )
        self.loads: list[Loads] | None = None if before is None else before.loads
        """Smoothed tokens per stage, layer and expert; None until the first are seen."""
        topology = Topology.of(config.parallel, world_size)
        operators = operators_of(config.model, 1)
        self._num_dense = parameters_of_stage(config.model, operators, topology, stage).num_dense
        self.plans = first_plans(config, self._requests, self._inputs) if before is None else before.plans

    @classmethod
    def following(
        cls, before: PlacementState, config: JobConfig, previous_ranks: Sequence[int | None]
    ) -> "tuple[PlacementManager, MigrationPlan] | Declined":
        """The keeper of the next membership, and what its ranks have to move for its plan. Of one pipeline stage.

        A pure function of its arguments.

        Args:
            before: of the membership before.
            config: of the next membership.
            previous_ranks: for each of its ranks, in order, the rank it is in ``before``; None where it has no state.
        """
        keeper = cls(config, world_size=len(previous_ranks), stage=0, before=before)
        found = plan_replicas(
            before.plans[0],
            previous_ranks,
            keeper._wanted,
            num_slots_per_rank=config.placement.num_slots_per_rank or 0,
            expert_bytes=expert_state_bytes(config),
        )
        if isinstance(found, Declined):
            return found
        keeper.plans = [found.placement]
        return keeper, found

    def evacuation(self, config: JobConfig, staying: Sequence[int]) -> MigrationPlan | None:
        """Plan the moves before all ranks but ``staying`` leave; None where these hold everything. For one stage.

        Args:
            config: of those that stay.
        """
        before = PlacementState(plans=self.plans, loads=self.loads)
        keeper = PlacementManager(config, world_size=len(staying), stage=0, before=before)
        return plan_drain(self.plans[0], staying, keeper._wanted, expert_bytes=expert_state_bytes(self._config))

    def replicas(self, plan: PlacementPlan | None = None) -> Replicas:
        """Placement and backend to build this rank's model with, for ``plan`` of its stage or the one in force."""
        return Replicas(plan=self.plans[self._stage] if plan is None else plan, backend=self._backend)

    def copy_plan(self) -> StateCopyPlan | None:
        """Plan copies of this stage's optimizer state; None where only computing copies keep it."""
        return plan_state_copies(self._config, self.plans[self._stage], self._num_dense)

    @property
    def single_loss_survival(self) -> float | None:
        """Probability that the job continues by its replicas when one failure domain is lost; None where a lost node
        ends the job, and where there is one domain."""
        launch = self._config.launch
        if launch.min_nodes is None or launch.keep_layout:
            return None
        return single_loss_survival(self.plans, min_ranks=launch.min_nodes * launch.ranks_per_node)

    @property
    def needs_loads(self) -> bool:
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
        if iteration in self._inputs.schedule:
            plans = scripted_plans(self._requests, self._inputs.schedule[iteration])
            return self._change([self._migration(stage, plan) for stage, plan in enumerate(plans)], "scripted", 0.0)
        if self.loads is None or not self._policy.due(iteration - 1):
            return None
        # Every rank plans all stages: whether a placement changes is one decision of the whole job.
        migrations = [self._replan(stage) for stage in range(len(self.plans))]
        verdicts = [
            self._policy.decide(plan, migration, loads)
            for plan, migration, loads in zip(self.plans, migrations, self.loads, strict=True)
        ]
        if not any(verdict.pays for verdict in verdicts):
            return None
        # A stage that would gain too little keeps its plan, and its migration moves nothing.
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
        return self.part_of(change)

    def part_of(self, change: Change) -> MigrationPlan:
        """Migration that this rank's stage carries out for ``change``."""
        return change.migrations[self._stage]

    def to_json(self) -> dict[str, Any]:
        """Plans and loads, for checkpoints and for a scripted history."""
        return PlacementState(plans=self.plans, loads=self.loads).to_json()

    def write(self, path: Path) -> None:
        """Keep the plans in force as a file that ``placement.schedule`` can name."""
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(self.to_json()))

    def restore(self, content: dict[str, Any] | None) -> None:
        """Go on from ``to_json``.

        Where the plans do not fit (other ranks, slots or failure domains), new ones are made from the loads; other
        pipeline stages start like a new run, and so does a checkpoint without replicas (None).
        """
        if content is None:
            return
        state = PlacementState.from_json(content)
        plans, loads = state.plans, state.loads
        if [plan.layer_numbers for plan in plans] != [request.layer_numbers for request in self._requests]:
            return
        self.loads = loads
        if all(fits(plan, request) for plan, request in zip(plans, self._requests, strict=True)):
            self.plans = plans
        elif loads is not None:
            self.plans = [self._place(stage, of_stage) for stage, of_stage in enumerate(loads)]

    # -- parts --------------------------------------------------------------------------------------------

    def _place(self, stage: int, loads: Loads, previous: Holdings | None = None) -> PlacementPlan:
        plan, _ = place_stage(self._requests[stage], self._algorithm, loads, previous)
        return plan

    def _wanted(self, previous: Holdings) -> PlacementPlan:
        """The plan that present loads ask for, or those of a new run where none are seen yet."""
        if self.loads is not None:
            return self._place(0, self.loads[0], previous)
        return self._place(0, first_loads(self._config, self._requests[0], self._inputs), previous)

    def _replan(self, stage: int) -> MigrationPlan:
        assert self.loads is not None, "plans are made from loads"
        held = holdings(self.plans[stage])
        wanted = self._place(stage, self.loads[stage], held)
        return self._migration(stage, remap(wanted, held))

    def _migration(self, stage: int, plan: PlacementPlan) -> MigrationPlan:
        return plan_migration(plan, holdings(self.plans[stage]), expert_state_bytes(self._config))

    def _change(self, migrations: Sequence[MigrationPlan], reason: str, gain: float) -> Change:
        loads = self.loads
        before = after = math.nan
        if loads is not None:
            before, after = (
                max(imbalance(plan, of_stage, self._policy.shares) for plan, of_stage in zip(plans, loads, strict=True))
                for plans in (self.plans, [migration.placement for migration in migrations])
            )
        return Change(
            migrations=tuple(migrations), reason=reason, gain=gain, imbalance_before=before, imbalance_after=after
        )

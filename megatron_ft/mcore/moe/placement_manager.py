"""Stores the placement of experts and the expert loads of a run, and plans new placements.

Loads are summed over all ranks, so every rank has the same loads. Plans are pure functions of the loads, so every rank
computes the same plans for all stages without communication.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, read_first_loads, read_schedule
from megatron_ft.config.placement import PlacementConfig
from megatron_ft.durable import fsync_folder, replace_file
from megatron_ft.mcore.device.install import resolve_device
from megatron_ft.mcore.moe.replica_layer import Replicas
from megatron_ft.mcore.optimizer.state_copies import StateCopies
from megatron_ft.mcore.state.tensors import NamedState, SavedExperts
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.operators import operators_of
from megatron_ft.planning.cost.memory import RankParameters, expert_state_bytes
from megatron_ft.planning.placement.copies import StateCopyPlan
from megatron_ft.planning.placement.layout import Holdings
from megatron_ft.planning.placement.migration import MigrationPlan, Step, holdings, remap, replacement_steps
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.rebalance import RebalancePolicy, imbalance, smooth
from megatron_ft.planning.placement.report import plan_state_copies
from megatron_ft.planning.placement.stage import StageRequest, algorithm_of, first_plans, scripted_plans
from megatron_ft.planning.placement.survival import single_loss_survival
from megatron_ft.planning.recovery.living_state import StageHolders, plan_drain, plan_replicas
from megatron_ft.planning.state.declined import Declined
from megatron_ft.runtime.dispatch.backend import DispatchBackend, open_backend
from megatron_ft.topology import Topology

Loads = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A planned change of the placement of experts, in all pipeline stages."""

    migrations: tuple[MigrationPlan, ...]
    reason: str
    gain: float
    imbalance_before: float
    imbalance_after: float

    @property
    def moved_bytes(self) -> int:
        """Number of bytes that the ranks of all stages send to carry out this change."""
        return sum(migration.num_bytes for migration in self.migrations)


@dataclass(frozen=True, kw_only=True)
class PreviousPlacement:
    """State with which a rank can return to the placement before a migration of experts."""

    before_iteration: int
    """First iteration with the new placement."""
    plans: list[PlacementPlan]
    """Placement of experts before the migration, for each pipeline stage."""
    state: NamedState
    """Tensors of this rank from before the migration. During the migration, these are all tensors; afterwards only
    those of experts that this rank no longer has. Always empty if ``is_in_place``."""
    host: TrainState | None = None
    """State of this rank besides tensors, from before the migration. It is used if the migration fails, because the
    engine then has no usable state. None after the migration."""
    is_evacuation: bool = False
    """Whether the migration moved all experts to the ranks that stay in the job, because other ranks will leave."""
    copies: StateCopies | None = None
    """Copies of optimizer state that were made before the migration; None without any, or once newer copies exist."""
    is_in_place: bool = False
    """Whether the migration overwrites experts in the tensors of the model. If so, the model may now lack some of the
    experts that ``plans`` assigns to this rank."""
    saved: SavedExperts | None = None
    """Copies of the experts that this rank has overwritten; None if they are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementState:
    """Placement and expert loads of a job. They are passed on to the next membership, or saved in a checkpoint."""

    plans: list[PlacementPlan]
    """Current placement of experts, for each pipeline stage."""
    loads: list[Loads] | None
    """Smoothed number of tokens of each expert, by stage and layer; None before the first iteration."""

    def to_json(self) -> dict[str, Any]:
        return {"stages": [plan.to_json() for plan in self.plans], "loads": self.loads}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PlacementState":
        plans = [PlacementPlan.from_json(plan) for plan in content["stages"]]
        return cls(plans=plans, loads=content["loads"])


def open_dispatch(config: JobConfig) -> DispatchBackend:
    """Open the dispatch backend of a job with expert replicas. Build its kernels first if they are not in the cache.

    Raises:
        SoftwareError: the kernels cannot be built or run on this machine.
    """
    return _opened(config.placement.dispatch_backend, config.training.device, config.placement.shares)


@cache
def _opened(name: str, device: str, shares: str) -> DispatchBackend:
    """Open a dispatch backend once for all memberships of this process. The arguments are values of config keys."""
    backend = PlacementConfig(dispatch_backend=name).backend_on(resolve_device(device))
    return open_backend(backend, shares)


class PlacementManager:
    """The current placement of all stages of a job, and the loads from which new placements are planned.

    Args:
        config: configuration of the membership.
        stage: pipeline stage of this rank.
        before: plans and loads of the previous membership; None makes the first plans of a new run.
    """

    def __init__(self, config: JobConfig, *, stage: int, before: PlacementState | None = None) -> None:
        self._config = config
        self._stage = stage
        self._algorithm = algorithm_of(config)
        self._requests = StageRequest.of_job(config)
        self._backend = open_dispatch(config)
        self._inputs = JobInputs(loads=read_first_loads(config), schedule=read_schedule(config))
        self._policy = RebalancePolicy(
            interval_iterations=config.placement.rebalance_interval,
            min_gain=config.placement.rebalance_min_gain,
            bytes_per_saved_token=config.placement.rebalance_bytes_per_token,
            shares=config.placement.shares,
        )
        self.loads: list[Loads] | None = None if before is None else before.loads
        """Smoothed number of tokens of each expert, by stage and layer; None before the first iteration."""
        topology = Topology.of(config.parallel, config.world_size)
        operators = operators_of(config.model, 1)
        self._num_dense = RankParameters.of_stage(config.model, operators, topology, stage).num_dense
        self.plans = first_plans(config, self._requests, self._inputs) if before is None else before.plans

    def follow(self, holders: Sequence[StageHolders]) -> tuple[MigrationPlan, ...] | Declined:
        """Plan and adopt the placement of every stage for this membership, based on the previous placement. ``holders``
        describes, for each stage, which ranks have experts from the previous membership.

        The result depends only on the configuration, the previous placements and ``holders``. Return the migrations of
        all stages, or ``Declined`` with the reason if a migration is impossible.
        """
        found = []
        for stage, (plan, held) in enumerate(zip(self.plans, holders, strict=True)):
            migration = plan_replicas(
                plan,
                held.previous_ranks,
                partial(self._wanted, stage),
                num_slots_per_rank=self._config.placement.num_slots_per_rank or 0,
                expert_bytes=expert_state_bytes(self._config),
                owned=held.owned,
                others=held.others,
            )
            if isinstance(migration, Declined):
                return migration
            found.append(migration)
        self.plans = [migration.placement for migration in found]
        return tuple(found)

    def evacuation(self, staying: Collection[int]) -> "Change | None":
        """Plan migrations that move all experts to the ranks ``staying``, before all other ranks leave the job.

        Return None if the ranks that stay already have all experts. Every stage needs enough staying ranks for all of
        its experts.
        """
        found = [
            self._evacuation(stage, [rank for rank in plan.ranks if rank in staying])
            for stage, plan in enumerate(self.plans)
        ]
        if not any(found):
            return None
        kept = [self._migration(stage, plan) for stage, plan in enumerate(self.plans)]
        return self._change([new or old for new, old in zip(found, kept, strict=True)], "evacuation", 0.0)

    def _evacuation(self, stage: int, staying: Sequence[int]) -> MigrationPlan | None:
        request = self._requests[stage]
        # Only the staying ranks get experts, and these ranks may be in too few failure domains for all replicas.
        smaller = replace(request, ranks=tuple(staying))
        smaller = replace(smaller, min_replicas=min(request.min_replicas, smaller.num_domains))
        return plan_drain(
            self.plans[stage],
            staying,
            partial(self._wanted, stage, request=smaller),
            expert_bytes=expert_state_bytes(self._config),
        )

    def replicas(self, plan: PlacementPlan | None = None) -> Replicas:
        """Return ``plan`` and the dispatch backend as one object for a model. Default: this stage's current plan."""
        return Replicas(plan=self.plans[self._stage] if plan is None else plan, backend=self._backend)

    def copy_plan(self) -> StateCopyPlan | None:
        """Plan the copies of this stage's optimizer state. Return None if ``placement.state_copies`` is null."""
        return plan_state_copies(self._config, self.plans[self._stage], self._num_dense)

    @property
    def single_loss_survival(self) -> float | None:
        """Probability that the job can continue from expert replicas after the loss of one failure domain. None if the
        job does not continue with fewer nodes, or if there is only one failure domain."""
        launch, recovery = self._config.launch, self._config.recovery
        is_kept = recovery.keep_layout and not self._config.may_change_layout
        if recovery.min_nodes is None or is_kept or not recovery.may_use("living_state"):
            return None
        return single_loss_survival(self.plans, min_ranks=recovery.min_nodes * launch.ranks_per_node)

    def observe(self, load: torch.Tensor) -> None:
        """Add ``load``, the number of tokens of each expert in one iteration, to the smoothed loads. ``load`` is int64
        [num_layers, num_moe_experts], summed over all ranks. Call this after every iteration, even if no rebalancing is
        configured, because the placement after the loss of a node is planned from these loads."""
        rows = load.tolist()
        weight = self._config.placement.load_smoothing
        newest = [[rows[number - 1] for number in request.layer_numbers] for request in self._requests]
        previous: Sequence[Loads | None] = self.loads or [None] * len(newest)
        self.loads = [smooth(old, new, weight) for old, new in zip(previous, newest, strict=True)]

    def change_before(self, iteration: int) -> Change | None:
        """Return the change of placement that is due before ``iteration``, or None. A change is due if
        ``placement.schedule`` contains it, or if the expected gain of a new placement is large enough."""
        if iteration in self._inputs.schedule:
            plans = scripted_plans(self._requests, self._inputs.schedule[iteration])
            return self._change([self._migration(stage, plan) for stage, plan in enumerate(plans)], "scripted", 0.0)
        if self.loads is None or not self._policy.due(iteration - 1):
            return None
        # Every rank plans all stages, because all stages change their placements before the same iteration.
        migrations = [self._replan(stage) for stage in range(len(self.plans))]
        verdicts = [
            self._policy.decide(plan, migration, loads)
            for plan, migration, loads in zip(self.plans, migrations, self.loads, strict=True)
        ]
        if not any(verdict.pays for verdict in verdicts):
            return None
        # A stage that would save too little keeps its placement. Its migration moves nothing.
        kept = [
            migration if verdict.pays else self._migration(stage, self.plans[stage])
            for stage, (migration, verdict) in enumerate(zip(migrations, verdicts, strict=True))
        ]
        best = max(verdicts, key=lambda verdict: verdict.gain)
        return self._change(kept, best.reason, best.gain)

    def propose(self) -> Change:
        """Return the change to the best placement for the current loads, even if its expected gain is small."""
        return self._change([self._replan(stage) for stage in range(len(self.plans))], "asked for", 0.0)

    def adopt(self, change: Change) -> MigrationPlan:
        """Make the placement of ``change`` the current one. Return the migration of this rank's stage."""
        self.plans = [migration.placement for migration in change.migrations]
        return self.part_of(change)

    def part_of(self, change: Change) -> MigrationPlan:
        """Return the part of ``change`` that migrates the experts of this rank's stage."""
        return change.migrations[self._stage]

    def steps_to(self, change: Change) -> list[Step] | None:
        """Divide the migration of this rank's stage into steps that replace experts in place. Return None on all ranks
        if this is impossible in any stage. All stages must then rebuild their models, because the build is
        collective."""
        steps = [replacement_steps(plan, new) for plan, new in zip(self.plans, change.migrations, strict=True)]
        return None if None in steps else steps[self._stage]

    def to_json(self) -> dict[str, Any]:
        """Return plans and loads as JSON values, for checkpoints and placement files."""
        return PlacementState(plans=self.plans, loads=self.loads).to_json()

    def write(self, path: Path) -> None:
        """Write the current plans durably and atomically to ``path``, a file that ``placement.schedule`` can name.

        Raises:
            OSError: the write failed. An existing file at ``path`` is unchanged.
        """
        path.parent.mkdir(exist_ok=True)
        fsync_folder(path.parent.parent)
        replace_file(path, json.dumps(self.to_json()).encode())

    def refresh_domains(self) -> None:
        """Record the failure domains of the present nodes in the plans. Experts keep their slots."""
        self.plans = [request.with_domains(plan) for plan, request in zip(self.plans, self._requests, strict=True)]

    def restore(self, content: dict[str, Any] | None, *, keeps_slots: bool = False) -> None:
        """Continue with ``content``, the result of ``to_json`` in a checkpoint or window. If the plans in ``content``
        do not fit the ranks and slots of this job, make new plans from the loads in it. Change nothing if ``content``
        is None, or if its stages have other layers than those of this job: the job then uses the plans of a new run.

        Args:
            keeps_slots: whether experts keep their slots even if their replicas are in fewer failure domains now, e.g.
                because a spare has replaced a node. A replay of a window needs the slots of that window.
        """
        if content is None:
            return
        state = PlacementState.from_json(content)
        former, loads = state.plans, state.loads
        if [plan.layer_numbers for plan in former] != [request.layer_numbers for request in self._requests]:
            return
        self.loads = loads
        # If only names of domains differ, keep the slots: other slots would change the order of additions.
        plans = [request.with_domains(plan) for plan, request in zip(former, self._requests, strict=True)]
        has_domains = keeps_slots or all(now.spread >= plan.spread for now, plan in zip(plans, former, strict=True))
        if has_domains and all(request.fits(plan) for plan, request in zip(plans, self._requests, strict=True)):
            self.plans = plans
        elif loads is not None:
            self.plans = [self._place(stage, of_stage) for stage, of_stage in enumerate(loads)]

    # -- parts --------------------------------------------------------------------------------------------

    def _place(self, stage: int, loads: Loads, previous: Holdings | None = None) -> PlacementPlan:
        plan, _ = self._requests[stage].place(self._algorithm, loads, previous)
        return plan

    def _wanted(self, stage: int, previous: Holdings, request: StageRequest | None = None) -> PlacementPlan:
        wanted = request or self._requests[stage]
        loads = wanted.first_loads(self._config, self._inputs) if self.loads is None else self.loads[stage]
        return wanted.place(self._algorithm, loads, previous)[0]

    def _replan(self, stage: int) -> MigrationPlan:
        assert self.loads is not None, "a new placement needs the loads of at least one iteration"
        held = holdings(self.plans[stage])
        wanted = self._place(stage, self.loads[stage], held)
        return self._migration(stage, remap(wanted, held))

    def _migration(self, stage: int, plan: PlacementPlan) -> MigrationPlan:
        return MigrationPlan.between(plan, holdings(self.plans[stage]), expert_state_bytes(self._config))

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

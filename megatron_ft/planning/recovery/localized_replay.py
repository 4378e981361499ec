"""Recovery strategy ``localized_replay``: a replay by the pipeline stages that lost a rank (``recovery.keep_layout``).

Other processes take the places of lost ranks. If living ranks have all state that these places need, they send it to
the new processes, and no iteration runs again. Otherwise all ranks of the stage go back to the newest committed window.
Adjacent stages that go back form a *region* and replay jointly; separate regions replay at the same time. A stage next
to a region keeps its state and computes nothing. It sends the tensors that it has logged (MoEvement, section 3.4 and
appendix A).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from megatron_ft.config.requirements import REQUIREMENTS, Requirement
from megatron_ft.planning.pipeline import Direction
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.living_state import NO_HOLDER, LivingState, why_no_living_places
from megatron_ft.planning.recovery.strategy import NOT_RUNNING, Cost, Loss, SavedKind, why_no_replacement
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.planning.state.declined import Declined
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True)
class LocalizedReplay:
    """Other nodes replace the lost nodes in the same layout, and only pipeline stages that lost a rank replay."""

    name: ClassVar[str] = "localized_replay"
    requirements: ClassVar[tuple[Requirement, ...]] = REQUIREMENTS[name]
    reads: ClassVar[tuple[SavedKind, ...]] = ("memory",)

    def cost(self, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
        """Compute the cost of the recovery; iterations since the newest committed window run again."""
        if reason := _why_not(loss, facts):
            return Declined(strategy=self.name, reason=reason)
        stored = loss.stored
        if stored is None or stored.memory_start is None:
            bound = facts.window_bound(1)
            again = None if bound is None else bound + facts.config.upstream_log.commit_lag_iterations
        else:
            again = stored.again_from(stored.memory_start)
        return Cost.in_processes(
            self.name,
            loss,
            facts,
            again,
            # The new ranks in the place of a lost node get the windows of the node from a peer.
            sent_bytes=facts.snapshot.window_bytes if loss.is_gone and facts.snapshot is not None else 0,
            lost_operators=loss.missing,
            is_bitwise=True,
            stages=_replaying_stages(loss, facts),
        )


def _replaying_stages(loss: Loss, facts: RecoveryFacts) -> tuple[int, ...]:
    # A stage replays if some of its state is lost. An adjacent stage that lost a rank replays too: its log is lost.
    lost = facts.stages_of(loss.nodes)
    # If living ranks cannot send state, and ``NO_HOLDER`` is not the reason, every stage that lost a rank replays.
    found = (
        set(facts.stages_with(loss.missing)) & set(lost) if why_no_living_places(loss, facts) == NO_HOLDER else set()
    )
    if not found:
        return lost
    parallel = facts.config.parallel
    num_stages, is_ring = parallel.pipeline_model_parallel_size, bool(parallel.virtual_pipeline_model_parallel_size)
    for _ in lost:
        found |= {to for stage in found for to in _neighbours(stage, num_stages, is_ring).values() if to in lost}
    return tuple(sorted(found))


def _why_not(loss: Loss, facts: RecoveryFacts) -> str:
    config = facts.config
    if not config.recovery.keep_layout:
        return "recovery.keep_layout=false: no other node replaces a lost node"
    if not config.keeps_processes:
        is_chosen = config.recovery.keep_processes is False
        key = "recovery.keep_processes=false" if is_chosen else f"training.device={config.training.device}"
        return f"{key}: all ranks start again"
    if unmet := Requirement.unmet_values(config, LocalizedReplay.requirements):
        return "; ".join(unmet)
    if not facts.is_running:
        return NOT_RUNNING
    if not loss.remaining:
        return "no rank survives, so the logged votes are lost"
    if not why_no_living_places(loss, facts):
        return "living ranks have all state, so that no iteration has to run again"
    if reason := why_no_replacement(loss, facts):
        return reason
    # If only ranks have died, their windows are still on their nodes. Lost nodes need copies on remaining nodes.
    if loss.is_gone and (alone := facts.without_copies(loss.nodes, loss.remaining)):
        return f"no remaining node has copies of the windows of nodes {alone}"
    if loss.stored is not None and loss.stored.memory_start is None:
        return "no window has been committed yet"
    if loss.stored is not None and (start := loss.stored.memory_start or 0) < loss.stored.placed_from:
        # ``LocalizedPlan.of`` returns ``Declined`` for the same reason.
        moved = f"experts moved after the newest committed window started (iteration {start})"
        return f"{moved} and before iteration {loss.stored.placed_from}, so this window cannot be replayed"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Report of one rank about its state when a membership with the same layout begins."""

    stage: int
    iteration: int | None
    """Iteration whose state the rank has, the same for all ranks with state; None for a rank without state."""
    is_overwritten: bool = False
    """Whether a failed replay has overwritten the rank's tensors. The rank still has its non-tensor state."""
    is_copied: bool = False
    """Whether the rank has a copy of its state from before the replay (``LocalizedPlan.may_copy``)."""
    has_whole_weights: bool = True
    """Whether all weights on this rank are up to date. If not, only those of its optimizer shard are up to date."""
    window: WindowKey | None = None
    """Newest window that the rank knows to be committed; another rank may know a newer window from the last vote."""
    holds: tuple[str, ...] = ()
    """Parts of the state that the rank has (units, see ``units_of``); ignored if ``has_state`` is false."""
    has_first_generators: bool = True
    """Whether no random numbers have been drawn since the rank's model was built. If so, the random number generators
    of a new process in the place of this rank have the same state."""
    copy_plan: str | None = ""
    """Digest of the plan by which the rank sent copies of its state and stores copies of other ranks' state
    (``placement.state_copies``). None if it lacks copies that it must store; empty if the job makes no copies."""
    placed_from: int = 0
    """First iteration that was committed with the present placement of experts. In windows that started before this
    iteration, experts are on the ranks of an older placement."""
    logged: tuple[int, ...] = ()
    """Iterations in the rank's upstream log, ascending."""
    voted: tuple[int, ...] = ()
    """Iterations whose vote the rank still has, ascending."""

    @property
    def has_state(self) -> bool:
        """Whether the rank has the complete state after ``iteration``."""
        return self.iteration is not None and not self.is_overwritten

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Standing":
        window = None if content["window"] is None else WindowKey(**content["window"])
        lists = {name: tuple(content[name]) for name in ("logged", "voted", "holds")}
        return cls(**{**content, **lists, "window": window})


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalizedPlan:
    """Plan that brings all ranks to the state after iteration ``target``."""

    num_stages: int
    is_ring: bool
    """Whether the last stage also sends to the first one, as with virtual stages."""
    window: WindowKey | None
    """Newest committed window; None if no window is committed and no rank needs one."""
    target: int
    """Iteration after which all ranks continue."""
    placed_from: int = 0
    """First iteration with the present placement of experts: the largest ``Standing.placed_from`` of all ranks."""
    regions: tuple[tuple[int, ...], ...]
    """Groups of adjacent stages that replay jointly, ascending within each group; empty if no stage replays."""
    receiving: tuple[int, ...] = ()
    """Stages with ranks that receive their state from living ranks, ascending."""
    reasons: tuple[str, ...] = ()
    """Reasons why stages replay. If the job may not use ``living_state``, stages that lost a rank always replay, and
    this field gives no reason for these stages."""
    may_copy: bool = False
    """Whether the living ranks have all units of state, in their tensors or in copies. A replay is then necessary only
    for the random number generators of lost ranks, or after a failed replay. Ranks may copy their state before a
    replay: with these copies, the job can continue with fewer lanes if another rank is lost in the replay."""

    @property
    def strategy(self) -> str:
        """Name of the recovery strategy that the plan uses."""
        return LocalizedReplay.name if self.regions else LivingState.name

    @property
    def iterations(self) -> range:
        """Iterations that each region (adjacent stages that replay together) runs again."""
        start = self.target if self.window is None else self.window.start_iteration
        return range(start + 1, self.target + 1)

    def region_of(self, stage: int) -> tuple[int, ...] | None:
        """Return the region that contains ``stage``; None if the stage does not replay."""
        return next((region for region in self.regions if stage in region), None)

    def replays(self, stage: int) -> bool:
        """Whether a stage replays."""
        return self.region_of(stage) is not None

    def lacks_copies(self, stage: int, standings: Sequence[Standing]) -> bool:
        """Whether ranks of ``stage`` must receive their state copies again. They must if the stage replays (a replay
        discards the copies), if a rank of the stage lacks its copies, or if ranks follow different plans."""
        plans = {found.copy_plan for found in standings if found.stage == stage}
        # Plans differ if an earlier recovery was interrupted after only some ranks had made copies by a new plan.
        return self.replays(stage) or None in plans or len(plans) > 1

    def neighbours(self, stage: int) -> Mapping[Direction, int]:
        """Return the stages to which ``stage`` sends tensors: the next (``forward``) and previous (``backward``)."""
        return _neighbours(stage, self.num_stages, self.is_ring)

    def serves(self, stage: int) -> tuple[tuple[Direction, int], ...]:
        """Return (direction, adjacent stage) for each adjacent stage that replays. ``stage`` sends its logged tensors
        to these stages. The result is empty if ``stage`` itself replays."""
        if self.replays(stage):
            return ()
        return tuple((direction, to) for direction, to in self.neighbours(stage).items() if self.replays(to))

    def voter(self, standings: Sequence[Standing]) -> int:
        """Return the rank that sends votes and non-tensor state to all ranks. Of the ranks with state, it is the
        one whose votes cover the largest number of iterations to replay; of several such ranks, the first."""
        # One rank is enough, because votes are the same on every rank.
        able = [rank for rank, standing in enumerate(standings) if standing.iteration is not None]
        return max(able, key=lambda rank: (len(set(self.iterations) & set(standings[rank].voted)), -rank))

    def validate(self) -> None:
        """Assert that regions are separate and that the window starts at or before the target."""
        stages = [stage for region in self.regions for stage in region]
        assert len(stages) == len(set(stages)) and set(stages) <= set(range(self.num_stages)), (
            "a stage is in two regions or does not exist"
        )
        assert self.window is not None or not stages, "stages replay without a window"
        assert not set(stages) & set(self.receiving), "a stage that replays receives state"
        assert self.window is None or self.target >= self.window.start_iteration, "the window starts after the target"
        for region in self.regions:
            beside = {to for stage in region for to in self.neighbours(stage).values()} - set(region)
            assert not any(self.replays(stage) for stage in beside), f"region {region} is adjacent to another region"

    def summary(self) -> str:
        if not self.regions or self.window is None:
            if not self.receiving:
                return f"all stages have the state after iteration {self.target}"
            receiving = _named(self.receiving).removesuffix(" jointly")
            return f"{receiving} of PP{self.num_stages} receive the state after iteration {self.target}"
        regions = " and ".join(_named(region) for region in self.regions)
        first, count = self.window.start_iteration, len(self.iterations)
        return (
            f"replay by {regions} of PP{self.num_stages} from the window of iteration {first} to iteration "
            f"{self.target}, iterations: {count}"
        )

    @classmethod
    def of(
        cls,
        standings: Sequence[Standing],
        *,
        num_stages: int,
        is_ring: bool,
        needs: Sequence[Collection[str]] | None = None,
        may_replay: bool = True,
    ) -> "LocalizedPlan | Declined":
        """Decide which stages receive state and which replay, or return the reason why the job cannot continue.

        Args:
            standings: report of every rank, by rank; at least one rank must have state.
            is_ring: whether the last stage also sends to the first one, as with virtual stages.
            needs: units of state that the place of each rank needs (see ``units_of``); None if living ranks may not
                send state.
            may_replay: whether stages may replay.
        """
        targets = {standing.iteration for standing in standings if standing.iteration is not None}
        assert len(targets) == 1, f"surviving ranks are at different iterations: {sorted(targets)}"
        # All ranks of a stage go back together, because all of them take part in the collectives of the replay.
        behind = sorted({standing.stage for standing in standings if not standing.has_state})
        reasons = dict.fromkeys(behind, "")
        if needs is not None:
            reasons = {stage: why for stage in behind if (why := _why_no_state(stage, standings, needs))}
        windows = [standing.window for standing in standings if standing.window is not None]
        plan = cls(
            num_stages=num_stages,
            is_ring=is_ring,
            # Votes commit windows for the whole job: every rank has its part of the newest window that any rank knows.
            window=max(windows, key=lambda kept: kept.start_iteration, default=None),
            target=targets.pop(),
            placed_from=max(standing.placed_from for standing in standings),
            regions=(),
            may_copy=needs is not None and _have_all(standings, needs),
        )
        while True:
            plan = replace(
                plan,
                regions=_regions(list(reasons), num_stages, is_ring),
                receiving=tuple(stage for stage in behind if stage not in reasons),
                reasons=tuple(why for _, why in sorted(reasons.items()) if why),
            )
            unlisted = "recovery.strategies does not contain localized_replay"
            why = plan._why_no_replay(standings) if may_replay else unlisted
            if reasons and why:
                return Declined(strategy=LocalizedReplay.name, reason="; ".join([why, *plan.reasons]))
            # A log contains only the messages of its own rank, so no other rank can replace missing entries.
            unlogged = {stage: why for stage in range(num_stages) if (why := plan._why_no_log(stage, standings))}
            if not unlogged:
                break
            reasons |= unlogged
        plan.validate()
        return plan

    def _why_no_replay(self, standings: Sequence[Standing]) -> str:
        if self.window is None:
            return "no window has been committed yet"
        if self.window.start_iteration < self.placed_from:
            started = f"after the newest committed window started (iteration {self.window.start_iteration})"
            return f"experts moved {started} and before iteration {self.placed_from}, so this window cannot be replayed"
        voter = self.voter(standings)
        unknown = sorted(set(self.iterations) - set(standings[voter].voted))
        if not unknown:
            return ""
        lacks = f"rank {voter} has the most, but lacks the votes of iterations {_span(unknown)}"
        return f"no rank has all votes since the window: {lacks}"

    def _why_no_log(self, stage: int, standings: Sequence[Standing]) -> str:
        # Only logs at the edges of a region are read; stages inside it send each other what they compute.
        if not self.serves(stage):
            return ""
        for rank, standing in enumerate(standings):
            lacking = sorted(set(self.iterations) - set(standing.logged)) if standing.stage == stage else []
            if lacking:
                lacks = f"the upstream log of rank {rank} lacks iterations {_span(lacking)}"
                return f"stage {stage}: {lacks}, which an adjacent stage needs"
        return ""


def needs_of(rank: int, topology: Topology, *, plan: PlacementPlan | None, is_sharded: bool) -> tuple[str, ...]:
    """Return the units of state that a joining process in the place of ``rank`` has to receive; see ``units_of``."""
    units = units_of(rank, topology, plan=plan, is_sharded=is_sharded)
    # If no living rank has weights of experts, they can be computed by rounding the master weights in the shards.
    return tuple(unit for unit in units if not is_sharded or unit != experts_unit(rank, topology))


def units_of(rank: int, topology: Topology, *, plan: PlacementPlan | None, is_sharded: bool) -> tuple[str, ...]:
    """Return the units of state that ``rank`` has. A unit is a part of the state; all ranks that have the unit have the
    same bits of it.

    Args:
        plan: placement of expert replicas in the rank's stage; None if Megatron assigns experts to ranks.
        is_sharded: whether the optimizer is sharded (``parallel.use_distributed_optimizer``). If so, the shard of each
            rank is a separate unit, which includes the optimizer state of experts unless experts have replicas.
    """
    units = [part_unit(rank, topology)]
    if plan is None:
        units.append(experts_unit(rank, topology))
    else:
        units += [expert_unit(layer, expert) for layer, expert in sorted(plan.of_rank(plan.ranks.index(rank)))]
    return (*units, shard_unit(rank)) if is_sharded else tuple(units)


def part_unit(rank: int, topology: Topology) -> str:
    """Return the name of the unit with the non-expert state of ``rank`` (only weights if the optimizer is sharded)."""
    return f"the non-expert state of {topology.describe_part(topology.model_parts[rank])}"


def experts_unit(rank: int, topology: Topology) -> str:
    """Return the unit name of the experts that Megatron gives to ``rank``: only weights if the optimizer is sharded."""
    place, part = topology.coordinates(rank), rank % topology.stage_size % topology.expert_tensor_parallel_size
    return f"the experts of expert-parallel rank {place.ep}, pipeline stage {place.pp}, expert tensor part {part}"


def expert_unit(layer: int, expert: int) -> str:
    """Return the name of the unit with the state of one expert with replicas; layers are numbered from 1."""
    return f"expert {expert} of layer {layer}"


def shard_unit(rank: int) -> str:
    """Return the name of the unit with the shard of the distributed optimizer that ``rank`` updates."""
    return f"the optimizer shard of rank {rank}"


def _have_all(standings: Sequence[Standing], needs: Sequence[Collection[str]]) -> bool:
    # Returns whether living ranks have all units of ``needs``, in their tensors or in copies of them.
    held = {unit for standing in standings if standing.has_state or standing.is_copied for unit in standing.holds}
    return all(unit in held for of_rank in needs for unit in of_rank)


def _why_no_state(stage: int, standings: Sequence[Standing], needs: Sequence[Collection[str]]) -> str:
    held = {unit for standing in standings if standing.has_state for unit in standing.holds}
    of_stage = [(rank, standing) for rank, standing in enumerate(standings) if standing.stage == stage]
    for rank, standing in of_stage:
        missing = [] if standing.has_state else [unit for unit in needs[rank] if unit not in held]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return f"{LivingState.name}: stage {stage}: no living rank has {missing[0]}{more}"
    # Ranks of a stage run the same code: if one of them has drawn random numbers, the lost rank has drawn, too.
    drawn = [rank for rank, standing in of_stage if not standing.has_first_generators]
    if drawn:
        return (
            f"{LivingState.name}: stage {stage}: rank {drawn[0]} has drawn random numbers since its model was built, "
            "so the generators of a lost rank are not known"
        )
    return ""


def _neighbours(stage: int, num_stages: int, is_ring: bool) -> dict[Direction, int]:
    found: dict[Direction, int] = {}
    if num_stages > 1 and (is_ring or stage + 1 < num_stages):
        # With virtual stages the last stage sends its output to the next chunk of the first one.
        found["forward"] = (stage + 1) % num_stages
    if num_stages > 1 and (is_ring or stage > 0):
        found["backward"] = (stage - 1) % num_stages
    return found


def _regions(stages: Sequence[int], num_stages: int, is_ring: bool) -> tuple[tuple[int, ...], ...]:
    left, regions = set(stages), []
    while left:
        region, reached = set[int](), {min(left)}
        while reached:
            region |= reached
            reached = {
                to for stage in reached for to in _neighbours(stage, num_stages, is_ring).values()
            } & left - region
        left -= region
        regions.append(tuple(sorted(region)))
    return tuple(regions)


def _named(region: Sequence[int]) -> str:
    return f"stage {region[0]}" if len(region) == 1 else f"stages {', '.join(map(str, region))} jointly"


def _span(iterations: Sequence[int]) -> str:
    is_gapless = iterations[-1] - iterations[0] + 1 == len(iterations)
    return f"{iterations[0]} to {iterations[-1]}" if is_gapless and len(iterations) > 1 else str(list(iterations))

"""Recovery strategy ``localized_replay``: only pipeline stages that lost a rank replay (``recovery.keep_layout``).

If a rank lacks the state after the target iteration, its whole stage goes back to the newest committed window. Adjacent
stages that go back form a *region* and replay jointly; separate regions replay at the same time. A healthy stage next
to a region sends the tensors that it has logged. It keeps its state and computes nothing (MoEvement, section 3.4 and
appendix A).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from megatron_ft.config.requirements import REQUIREMENTS, Requirement
from megatron_ft.planning.pipeline import Direction
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.strategy import NOT_RUNNING, Cost, Loss
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.planning.state.declined import Declined


@dataclass(frozen=True, slots=True)
class LocalizedReplay:
    """Other nodes replace the lost nodes in the same layout, and only pipeline stages that lost a rank replay."""

    name: ClassVar[str] = "localized_replay"
    requirements: ClassVar[tuple[Requirement, ...]] = REQUIREMENTS[name]

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
            # The ranks of a lost node get its windows from a peer.
            sent_bytes=facts.snapshot.window_bytes if loss.is_gone and facts.snapshot is not None else 0,
            replaces_nodes=loss.is_gone,
            lost_operators=loss.missing,
            is_bitwise=True,
            stages=facts.stages_of(loss.nodes),
        )


def _why_not(loss: Loss, facts: RecoveryFacts) -> str:
    config = facts.config
    if not config.recovery.keep_layout:
        return "recovery.keep_layout=false: no node takes the place of a lost one"
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
    # If only ranks have died, their windows are in the memory of their own node, and no node has to be replaced.
    if loss.is_gone:
        spares = config.nodes.num_spare_nodes
        if not config.nodes.restart_lost_nodes and len(loss.nodes) > spares:
            return f"nodes.num_spare_nodes={spares} is less than the number of lost nodes, {len(loss.nodes)}"
        # A copy on a node that is lost as well cannot be used.
        if alone := facts.without_copies(loss.nodes, loss.remaining):
            return f"no remaining node has copies of the windows of nodes {alone}"
    if loss.stored is not None and loss.stored.memory_start is None:
        return "no window has been committed yet"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Report of one rank about its state when a membership with the same layout begins."""

    stage: int
    iteration: int | None
    """Iteration after which the rank has the state, the same on all ranks with state; None without state."""
    is_overwritten: bool = False
    """Whether a replay that failed has overwritten the rank's tensors. The rank still has the rest of its state."""
    has_whole_weights: bool = True
    """Whether all weights on this rank are up to date; see ``Carried.has_whole_weights``."""
    window: WindowKey | None = None
    """Newest window that the rank knows to be committed; another rank may know a newer window from the last vote."""
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
        lists = {name: tuple(content[name]) for name in ("logged", "voted")}
        return cls(**{**content, **lists, "window": window})


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalizedPlan:
    """Plan that brings all ranks to the state after ``target``."""

    num_stages: int
    is_ring: bool
    """Whether the last stage also sends to the first one, as with virtual stages."""
    window: WindowKey | None
    """Newest committed window; None if no window is committed and no rank needs one."""
    target: int
    """Iteration after which all ranks continue."""
    regions: tuple[tuple[int, ...], ...]
    """Groups of adjacent stages that replay jointly, ascending within each group; empty if all ranks have state."""

    @property
    def iterations(self) -> range:
        """Iterations that a region runs again."""
        start = self.target if self.window is None else self.window.start_iteration
        return range(start + 1, self.target + 1)

    def region_of(self, stage: int) -> tuple[int, ...] | None:
        """Return the region that contains ``stage``, or None for a healthy stage."""
        return next((region for region in self.regions if stage in region), None)

    def replays(self, stage: int) -> bool:
        """Whether a stage replays."""
        return self.region_of(stage) is not None

    def neighbours(self, stage: int) -> Mapping[Direction, int]:
        """Return, for each direction, the stage to which ``stage`` sends tensors."""
        return _neighbours(stage, self.num_stages, self.is_ring)

    def serves(self, stage: int) -> tuple[tuple[Direction, int], ...]:
        """Return (direction, receiving stage) for the tensors that ``stage`` sends from its log, if it is healthy."""
        if self.replays(stage):
            return ()
        return tuple((direction, to) for direction, to in self.neighbours(stage).items() if self.replays(to))

    def voter(self, standings: Sequence[Standing]) -> int:
        """Return the rank that sends votes and non-tensor state to all ranks: of the ranks with this state, the first
        one that has the most votes of the iterations to replay."""
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
        assert self.window is None or self.target >= self.window.start_iteration, "the window starts after the target"
        for region in self.regions:
            beside = {to for stage in region for to in self.neighbours(stage).values()} - set(region)
            assert not any(self.replays(stage) for stage in beside), f"region {region} is adjacent to another region"

    def summary(self) -> str:
        if not self.regions or self.window is None:
            return f"all stages have the state after iteration {self.target}"
        regions = " and ".join(_named(region) for region in self.regions)
        first, count = self.window.start_iteration, len(self.iterations)
        return (
            f"replay by {regions} of PP{self.num_stages} from the window of iteration {first} to iteration "
            f"{self.target}, iterations: {count}"
        )

    @classmethod
    def of(cls, standings: Sequence[Standing], *, num_stages: int, is_ring: bool) -> "LocalizedPlan | Declined":
        """Decide which stages replay, or return the reason why localized replay is impossible.

        Args:
            standings: report of every rank, by rank; at least one rank must have state.
            is_ring: see ``LocalizedPlan``.
        """
        targets = {standing.iteration for standing in standings if standing.iteration is not None}
        assert len(targets) == 1, f"surviving ranks are at different iterations: {sorted(targets)}"
        target = targets.pop()
        # The whole stage goes back, because all of its ranks take part in every collective of the replay.
        behind = sorted({standing.stage for standing in standings if not standing.has_state})
        windows = [standing.window for standing in standings if standing.window is not None]
        if behind and not windows:
            return Declined(strategy=LocalizedReplay.name, reason="no window has been committed yet")
        # The vote commits a window for the whole job: if one rank knows the newest, every rank has its part.
        window = max(windows, key=lambda kept: kept.start_iteration, default=None)
        plan = cls(
            num_stages=num_stages,
            is_ring=is_ring,
            window=window,
            target=target,
            regions=_regions(behind, num_stages, is_ring),
        )
        voter = plan.voter(standings)
        unknown = sorted(set(plan.iterations) - set(standings[voter].voted)) if behind else []
        if unknown:
            reason = (
                f"no rank has all votes since the window: rank {voter} lacks the votes of iterations {_span(unknown)}"
            )
            return Declined(strategy=LocalizedReplay.name, reason=reason)
        for rank, standing in enumerate(standings):
            # Only logs at the edges of a region are read; stages inside it send each other what they compute.
            lacking = sorted(set(plan.iterations) - set(standing.logged)) if plan.serves(standing.stage) else []
            if lacking:
                reason = (
                    f"the upstream log of rank {rank} lacks iterations {_span(lacking)}, which an adjacent stage needs"
                )
                return Declined(strategy=LocalizedReplay.name, reason=reason)
        plan.validate()
        return plan


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

"""Cost of losing nodes: the recovery strategy, why other strategies are impossible, and the iterations that run again.

The strategies are those of the control plane. With ``replicas``, the job continues on fewer nodes, which must have a
replica of all state. With ``localized`` (``recovery.keep_layout``), other nodes replace the lost nodes, and only
pipeline stages that lost a rank replay. With any other strategy, all ranks restart. If only ranks died, all nodes
restart them from windows in memory, persisted windows or a dense checkpoint. If nodes are lost and enough nodes remain,
the remaining nodes restart the ranks from a dense checkpoint, because a window can only be loaded by as many ranks as
captured it. If too few nodes remain, the job ends and has to be started again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.placement.layout import Holdings
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.loss_cost import RUNGS, LossCost, Rung
from megatron_ft.planning.recovery.replicas import NO_HOLDER, Declined, plan_replicas

NOT_RUNNING = "the job is not running"

Place = Callable[[tuple[int, ...], Holdings], PlacementPlan]
"""Function that plans the placement of expert replicas on the ranks of the given nodes, from the experts that these
ranks hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOperator:
    """One operator and the ranks of the present membership that hold its state."""

    operator: OperatorId
    holders: tuple[frozenset[int], ...]
    """Set of the ranks that hold the part, for each part of the state."""

    def lives_on(self, ranks: frozenset[int]) -> bool:
        """Whether ``ranks`` together hold every part of the state."""
        return all(held & ranks for held in self.holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Saved state of a run, according to the records in its folder."""

    iteration: int
    """Newest committed iteration."""
    memory_start: int | None = None
    """Start iteration of the newest committed window in memory."""
    persisted_start: int | None = None
    """Start iteration of the newest complete persisted window."""
    checkpoint: int | None = None
    """Iteration of the newest complete dense checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryMeans:
    """Facts about a job that determine how it can recover, created by ``means.means_of``."""

    nodes: tuple[int, ...]
    """Present nodes, ascending; node numbers never change."""
    ranks_per_node: int
    failure_domains: tuple[str, ...]
    """Failure domain of each node that the job started with."""
    stages: tuple[tuple[int, ...], ...]
    """Pipeline stages in which the ranks of each present node train."""
    operators: tuple[HeldOperator, ...]
    min_nodes: int | None
    uncovered: tuple[str, ...]
    """Configuration keys, as ``key=value``, that prevent the job from continuing on fewer nodes."""
    placement: PlacementPlan | None
    num_slots_per_rank: int
    expert_bytes: int
    """Bytes of the state of one expert in one layer."""
    max_restarts: int
    takes_snapshots: bool
    peers: tuple[tuple[int, ...], ...]
    """Peers that store copies of a node's windows, for each node that the job started with; empty without snapshots."""
    window_iterations: int | None
    """Number of iterations of a window (W); None if it is not measured yet."""
    interval_iterations: int | None
    persist_interval_windows: int
    save_interval_iterations: int
    train_iterations: int
    keeps_layout: bool = False
    commit_lag_iterations: int = 0
    """Largest number of iterations from a window's last slice to the vote that commits it."""
    num_spare_nodes: int = 0
    restarts_lost_nodes: bool = False
    runs_in_slurm: bool = False
    """Whether a Slurm batch job restarts or requeues the training command after it has ended."""
    is_running: bool = True
    """Whether the job has running ranks, which could continue after a loss."""

    def ranks_on(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the ranks on ``nodes``."""
        size = self.ranks_per_node
        places = [self.nodes.index(node) for node in nodes]
        return frozenset(rank for place in places for rank in range(place * size, (place + 1) * size))

    def domain_of(self, node: int) -> str:
        """Return the failure domain of ``node``."""
        return self.failure_domains[node]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return notes about properties of the layout that make losses more expensive."""
        spans = [
            f"node {node} spans pipeline stages {', '.join(map(str, stages))}: its loss affects all of them"
            for node, stages in zip(self.nodes, self.stages, strict=True)
            if len(stages) > 1
        ]
        shared = [
            f"node {node} and its peer, node {peer}, are in the same failure domain {self.domain_of(node)}"
            for node in self.nodes
            for peer in (self.peers[node] if self.peers else ())
            if self.domain_of(peer) == self.domain_of(node)
        ]
        return (*spans, *shared)

    def cost_of_loss(
        self,
        lost: Sequence[int],
        *,
        is_gone: bool = True,
        place: Place | None = None,
        stored: Stored | None = None,
    ) -> LossCost:
        """Compute the cost of losing the nodes ``lost`` at the same time.

        Args:
            lost: node numbers.
            is_gone: whether the nodes are lost with their memory; otherwise only their ranks have died.
            place: function that plans the survivors' placement, to compute the bytes that move; None if not required.
            stored: saved state of the run; if it is None, the result has upper bounds that follow from the
                configuration.

        Raises:
            ConfigError: ``lost`` contains a node that is not present.
        """
        if foreign := sorted(set(lost) - set(self.nodes)):
            raise ConfigError.of("lost node", foreign[0], f"must be one of the present nodes {list(self.nodes)}")
        gone = tuple(sorted(set(lost)))
        remaining = tuple(node for node in self.nodes if node not in gone)
        restart = _restart(self, gone, remaining, is_gone)
        living = self.ranks_on(remaining)
        missing = tuple(held.operator for held in self.operators if not held.lives_on(living))
        declined: list[Declined] = []
        for rung in RUNGS:
            if rung == "localized" and not self.keeps_layout:
                continue
            if rung == "replicas":
                found = _replicas(self, remaining, missing, place)
            elif rung == "localized":
                found = _localized(self, gone, remaining, is_gone=is_gone, stored=stored)
            else:
                found = _store(self, rung, restart, is_gone=is_gone, stored=stored)
            if isinstance(found, _Served):
                break
            declined.append(found)
        assert isinstance(found, _Served), "every strategy declined"
        cost = LossCost(
            lost_nodes=gone,
            is_gone=is_gone,
            rung=rung,
            is_automatic=rung in ("replicas", "localized")
            or (restart is not None and not (rung == "nothing" and _has_unusable_windows(self, stored))),
            declined=tuple(declined),
            lost_operators=() if rung == "replicas" else missing,
            max_iterations=found.max_iterations,
            moved_bytes=found.moved_bytes,
            # Fewer ranks add the same numbers in another order.
            is_bitwise=rung == "localized" or (rung != "replicas" and restart != "fewer"),
            stages=_stages_of(self, gone) if rung == "localized" else (),
            max_windows=_persists(self) + 1 if rung == "persisted" else 2,
            restarted_by="Slurm" if self.runs_in_slurm else "hand",
        )
        cost.validate()
        return cost


@dataclass(frozen=True, slots=True)
class _Served:
    max_iterations: int | None
    moved_bytes: int | None = None


def _restart(
    means: RecoveryMeans, lost: tuple[int, ...], remaining: tuple[int, ...], is_gone: bool
) -> Literal["all", "fewer"] | None:
    # Returns the nodes on which the job itself restarts its ranks; None if the job ends.
    if not means.is_running or not means.max_restarts:
        return None
    if not is_gone:
        return "all"
    if means.keeps_layout and (means.restarts_lost_nodes or len(lost) <= means.num_spare_nodes):
        return "all"  # other nodes first replace the lost ones
    return "fewer" if means.min_nodes is not None and len(remaining) >= means.min_nodes else None


def _replicas(
    means: RecoveryMeans, remaining: tuple[int, ...], missing: tuple[OperatorId, ...], place: Place | None
) -> _Served | Declined:
    reason = ""
    if not means.is_running:
        reason = NOT_RUNNING
    elif means.uncovered or means.placement is None:
        reason = "; ".join(means.uncovered) or "placement.algorithm=null: experts have no replicas"
    elif means.min_nodes is None:
        reason = "recovery.min_nodes=null: all nodes are needed"
    elif len(remaining) < means.min_nodes:
        reason = f"recovery.min_nodes={means.min_nodes} is more than the number of remaining nodes, {len(remaining)}"
    elif not remaining:
        reason = "no node is left"
    if reason:
        return Declined(rung="replicas", reason=reason)
    # Joint over all operators: the loss of one expert of one layer is enough to end this strategy.
    if missing:
        return Declined(rung="replicas", reason=NO_HOLDER, missing=missing)
    if place is None:
        return _Served(0)
    assert means.placement is not None, "checked above"
    found = plan_replicas(
        means.placement,
        sorted(means.ranks_on(remaining)),
        lambda held: place(remaining, held),
        num_slots_per_rank=means.num_slots_per_rank,
        expert_bytes=means.expert_bytes,
    )
    return found if isinstance(found, Declined) else _Served(0, found.num_bytes)


def _localized(
    means: RecoveryMeans, lost: tuple[int, ...], remaining: tuple[int, ...], *, is_gone: bool, stored: Stored | None
) -> _Served | Declined:
    # If only ranks have died, their windows are in the memory of their own node; otherwise only peers have copies.
    reason = ""
    # A copy on a node that is lost as well cannot be used.
    alone = [node for node in lost if not set(means.peers[node]) & set(remaining)] if means.peers else list(lost)
    if not means.is_running:
        reason = NOT_RUNNING
    elif not remaining:
        reason = "no rank survives, so the logged votes are lost"
    elif is_gone and not means.restarts_lost_nodes and len(lost) > means.num_spare_nodes:
        reason = f"nodes.num_spare_nodes={means.num_spare_nodes} is less than the number of lost nodes, {len(lost)}"
    elif is_gone and alone:
        reason = f"no remaining node has copies of the windows of nodes {alone}"
    elif stored is not None and stored.memory_start is None:
        reason = "no window has been committed yet"
    if reason:
        return Declined(rung="localized", reason=reason)
    if stored is None or stored.memory_start is None:
        bound = _window_bound(means, 1)
        return _Served(None if bound is None else bound + means.commit_lag_iterations)
    return _Served(max(0, stored.iteration - stored.memory_start))


def _has_unusable_windows(means: RecoveryMeans, stored: Stored | None) -> bool:
    """Whether the run may have windows with committed iterations. If so, ranks that cannot load any state refuse to
    start at iteration 0 unless ``run.start_over=true``."""
    if stored is None:
        return means.takes_snapshots
    return stored.memory_start is not None or stored.persisted_start is not None


def _stages_of(means: RecoveryMeans, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({stage for node in nodes for stage in means.stages[means.nodes.index(node)]}))


def _store(
    means: RecoveryMeans, rung: Rung, restart: Literal["all", "fewer"] | None, *, is_gone: bool, stored: Stored | None
) -> _Served | Declined:
    match rung:
        case "memory":
            reason = _no_memory(means, restart, is_gone)
            start, bound = (None if stored is None else stored.memory_start), _window_bound(means, 1)
        case "persisted":
            start, bound = (None if stored is None else stored.persisted_start), _window_bound(means, _persists(means))
            reason = _no_persisted(means, restart, is_there=start is not None)
        case "checkpoint":
            start, bound = (None if stored is None else stored.checkpoint), means.save_interval_iterations
            reason = (
                "" if start is not None or bound else "checkpoint.save_interval_iterations=0: saved only at the end"
            )
        # Starting over loses every iteration so far.
        case _:
            return _Served(means.train_iterations if stored is None else stored.iteration)
    if reason:
        return Declined(rung=rung, reason=reason)
    if stored is None:
        return _Served(bound)
    if start is None:
        return Declined(rung=rung, reason="the run has not saved such state yet")
    return _Served(max(0, stored.iteration - start))


_OTHER_SIZE = "ranks restart on fewer nodes, but windows can only be loaded by the previous number of ranks"
_NO_SNAPSHOTS = "snapshot.policy=null: no windows are captured"


def _no_memory(means: RecoveryMeans, restart: str | None, is_gone: bool) -> str:
    if not means.takes_snapshots:
        return _NO_SNAPSHOTS
    if not means.is_running:
        return NOT_RUNNING
    if restart == "fewer":
        return _OTHER_SIZE
    if is_gone and restart == "all":
        return "windows and peer copies of the lost nodes are lost, or no window has been committed"
    if is_gone:
        return "the loss of a node ends the job, and windows in memory are lost with the job"
    return "" if restart else "recovery.max_restarts=0: the job does not restart its ranks"


def _no_persisted(means: RecoveryMeans, restart: str | None, *, is_there: bool) -> str:
    if restart == "fewer":
        return _OTHER_SIZE if means.takes_snapshots else _NO_SNAPSHOTS
    if is_there:
        return ""
    if not means.takes_snapshots:
        return _NO_SNAPSHOTS
    if not means.persist_interval_windows:
        return "snapshot.persist_interval_windows=0: windows are written to storage only before a stop"
    return ""


def _persists(means: RecoveryMeans) -> int:
    return max(1, means.persist_interval_windows)


def _window_bound(means: RecoveryMeans, num_windows: int) -> int | None:
    if means.window_iterations is None:
        return None
    assert means.interval_iterations is not None, "interval_iterations must be given with window_iterations"
    # In the worst case the failure comes just before the commit of the next window.
    return num_windows * means.interval_iterations + means.window_iterations

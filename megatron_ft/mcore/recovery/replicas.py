"""Moves to the next membership in the same processes: extracts state, forms groups again, restores state.

Experts of lost ranks come from their copies on the ranks that stay; all other state is complete on each of these ranks.
Each rank keeps its own random generators. Joining ranks, which have no state, join the same groups and receive all of
it.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership_schedule import MembershipChange
from megatron_ft.config.present_nodes import config_of
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import RecoveryError
from megatron_ft.events import CheckpointFailed, MembershipChanged, RecoveryStarted
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.data.data_checks import check_newcomers_data
from megatron_ft.mcore.groups import Groups, dissolve_groups, join
from megatron_ft.mcore.moe.migration import move_experts
from megatron_ft.mcore.moe.placement_manager import PlacementManager
from megatron_ft.mcore.optimizer.build import set_position
from megatron_ft.mcore.recovery.localized import recover_localized
from megatron_ft.mcore.snapshot.client import restart_snapshots
from megatron_ft.mcore.state.carried import Carried, MembershipStart, carry, hand_over, seed_newcomer, shapes_of
from megatron_ft.mcore.state.rank_status import Holding, Key, Previous, RankStatus, choose_holding
from megatron_ft.mcore.state.tensors import NamedState, put_state
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.mcore.training.trainer import Trainer
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.replicas import Declined, lost_experts
from megatron_ft.runtime.transport.hang_up import Opening
from megatron_ft.snapshot.storage.checkpoints import iteration_of
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME


def reconfigure(trainer: Trainer, following: NextMembership, *, store: dist.Store | None = None) -> None:
    """Continue ``trainer`` as a rank of ``following``, from the state after its target; collective over its ranks.

    The present groups may be broken, so nothing is sent through them. The trainer of a joining rank has none.

    Args:
        store: store of ``following``, if this process has opened it already.

    Raises:
        RecoveryError: no rank has some part of the state, which it names; or ranks would use different placements.
        DataError: a rank reads other data, and the others cannot survive without it.
        RuntimeError: the membership was not formed, because ranks were lost or read other data. The carried state is
            kept.
        TrainingStopped: the iteration that is finished for the target stops the run.
    """
    began = time.monotonic()
    carried = carry(trainer, following.target)
    # From here on a failure finds what this rank has carried, however far the membership has come.
    trainer.membership_start = MembershipStart(iteration=following.target.iteration, carried=carried)
    _let_go(trainer)
    trainer.config = trainer.engine.config = config = config_of(trainer.job, following.nodes)
    trainer.context, trainer.nodes = _context(trainer.context, following, config), following.nodes
    failpoints.enter(following.generation, rank=trainer.context.rank)
    groups = _join(trainer, store)
    present, fingerprints = _present(trainer, carried, groups)
    in_place = trainer.job.recovery.keep_layout
    key, previous = choose_holding(
        present,
        range(following.world_size) if in_place else following.nodes,
        following.generation,
        is_whole=partial(_is_whole, carried, groups),
    )
    check_newcomers_data(trainer, fingerprints, _first(previous))
    if in_place:
        recover_localized(trainer, carried, groups, following.target.iteration)
    else:
        if previous[trainer.context.rank] is None:
            carried = None  # what this rank has is of another membership than what the others continue from
        _go_on(trainer, carried, key, previous, groups)
    iteration = trainer.engine.iteration
    trainer.report(
        MembershipChanged(
            generation=following.generation,
            world_size=following.world_size,
            nodes=tuple(dict.fromkeys(following.nodes)),
            reason=following.reason,
            iteration=iteration,
            seconds=time.monotonic() - began,
            joining=_joining(following.nodes, previous),
            schedule=trainer.membership_start.changes,
        )
    )
    if trainer.placement is not None:
        trainer.report_placement("membership")
    # Rank 0 may have just joined, and know nothing of the finished iteration and of abandoned saves.
    trainer.reporting_rank = _first(previous)
    _report_abandoned_saves(trainer)
    if carried is not None and carried.finished is not None:
        finished, carried.finished = carried.finished, None
        trainer.account(finished, time.monotonic() - began, carried.batch)
    trainer.reporting_rank = 0


def _join(trainer: Trainer, store: dist.Store | None) -> Groups:
    # Form the groups of the membership of ``trainer``; a lost rank aborts this like a collective.
    failpoints.hit("reform_join", trainer.engine.iteration)
    opening = Opening()
    trainer.break_with(opening.hang_up)
    try:
        groups = join(
            trainer.config,
            trainer.context,
            device=trainer.device.type,
            timeout_seconds=trainer.config.recovery.reconfigure_timeout_seconds,
            store=store,
            opening=opening,
        )
    finally:
        opening.close()
    trainer.break_with(groups.transports.hang_up)
    return groups


def _present(trainer: Trainer, carried: Carried | None, groups: Groups) -> tuple[list[RankStatus | None], list[str]]:
    """Gather each rank's status (None for joining ranks) and the fingerprint of its samples."""
    mine = None if carried is None else RankStatus.of(carried.holdings).to_json()
    told = Collectives(groups.vote).gather([mine, trainer.samples["train"].fingerprint()])
    present = [None if found is None else RankStatus.from_json(found) for found, _ in told]
    return present, [fingerprint for _, fingerprint in told]


def _is_whole(carried: Carried | None, groups: Groups, key: Key, previous: Previous) -> bool:
    # Whether the ranks with a holding have every expert; collective. The first of them knows the placement.
    first, missing = _first(previous), None
    if groups.vote.rank() == first:
        placement = _held(carried, key).placement
        missing = placement is not None and bool(lost_experts(placement.plans[0], previous))
    return not Collectives(groups.vote).from_rank(first, missing)


def _held(carried: Carried | None, key: Key) -> Holding:
    assert carried is not None, "a rank with a holding has no state"
    return next(held for held in carried.holdings if held.key == key)


def _joining(nodes: Sequence[int], previous: Previous) -> tuple[int, ...]:
    return tuple(dict.fromkeys(node for node, rank in zip(nodes, previous, strict=True) if rank is None))


def _let_go(trainer: Trainer) -> None:
    # Release the present groups and all objects that use them; a joining or broken rank may have none.
    trainer.placement = None
    if dist.is_initialized():
        trainer.teardown()
    dissolve_groups()


def _go_on(trainer: Trainer, carried: Carried | None, key: Key, previous: Previous, groups: Groups) -> None:
    """Move missing state, then build and fill model and optimizer.

    Args:
        carried: None on a rank that is not in the holding.
        key: of the holding from which all continue.
    """
    host, held, shapes = _in_common(carried, key, previous, groups)
    keeper, migration = _placement(trainer, held, previous)
    generation = trainer.context.generation
    trainer.report(RecoveryStarted(generation=generation, strategy="replicas", iteration=host.iteration))
    state: NamedState = {} if carried is None else dict(carried.state)
    failpoints.hit("reform_move", host.iteration)
    like = None if shapes is None else hand_over(state, shapes, previous, groups)
    move_experts(state, migration, groups.pg_collection.ep, like=like)
    trainer.placement = keeper
    trainer.use(groups)
    engine = trainer.engine
    engine.iteration, engine.newest_vote, engine.in_progress = host.iteration, host.newest_vote, None
    failpoints.hit("reform_build", engine.iteration)
    engine.build(groups, keeper.replicas())
    put_state(engine.model_chunks, engine.optimizer, state)
    # Before ``restore``: the state that a joining rank has received holds no generators, and leaves these.
    if carried is None:
        seed_newcomer(trainer.job.training.seed, engine.iteration, groups)
    engine.restore(host)
    set_position(engine.scheduler, engine.iteration * trainer.job.training.global_batch_size)
    trainer.rounded_off = host.rounded_off
    _note_formed(trainer, held, previous, is_stopped=host.stopped is not None)
    trainer.keep_copies()
    restart_snapshots(trainer)
    # Reports about this membership from here on hold on every rank: all have formed it.
    trainer.collectives.any(False)
    if carried is None and host.stopped is not None:
        trainer.stop(engine.iteration + 1, host.stopped)


def _note_formed(trainer: Trainer, held: Holding, previous: Previous, *, is_stopped: bool) -> None:
    beginning, nodes = trainer.membership_start, tuple(trainer.nodes)
    assert beginning is not None, "no membership is being formed"
    change = MembershipChange.between(held.nodes, nodes, _joining(nodes, previous), beginning.iteration + 1)
    changes = (*held.changes, change.to_text())
    # A run that a policy stops has the state before the iteration: nothing comes after it.
    trainer.membership_start = replace(beginning, changes=changes, is_formed=not is_stopped)


def _in_common(
    carried: Carried | None, key: Key, previous: Previous, groups: Groups
) -> tuple[TrainState, Holding, list[tuple[str, str, str, list[int]]] | None]:
    # Broadcast the common state and, if ranks join, the shapes of its tensors; collective.
    # The same on every rank: all skip the broadcast, or none does.
    if None not in previous:
        assert carried is not None, "a rank without state did not join"
        return carried.host, _held(carried, key), None
    record = None
    if carried is not None:
        about = {"host": carried.host.to_json(own=False), "held": _held(carried, key).to_json()}
        record = {**about, "shapes": shapes_of(carried.state)}
    told = Collectives(groups.vote).from_rank(_first(previous), record)
    host = TrainState.from_json(told["host"]) if carried is None else carried.host
    return host, Holding.from_json(told["held"]), told["shapes"]


def _first(previous: Previous) -> int:
    return next(rank for rank, former in enumerate(previous) if former is not None)


def _placement(trainer: Trainer, held: Holding, previous: Previous) -> tuple[PlacementManager, MigrationPlan]:
    assert held.placement is not None, "the holding has no placement"
    found = PlacementManager.following(held.placement, trainer.config, previous)
    if isinstance(found, Declined):
        generation = trainer.context.generation
        raise RecoveryError(
            f"generation {generation} cannot continue with the state of the surviving ranks: {found.summary()}"
        )
    return found


def _report_abandoned_saves(trainer: Trainer) -> None:
    # Every rank forgets them here, also one that reports nothing: a later membership may have another reporting rank.
    abandoned, trainer.abandoned_saves = trainer.abandoned_saves, []
    for path in abandoned:
        error = "ranks were lost while it was written; the state they continue with is saved instead"
        if (path / MANIFEST_NAME).exists():
            error = "ranks were lost before all knew that it is complete; the state they continue with is saved as well"
        trainer.report(CheckpointFailed(iteration=iteration_of(path), error=error, path=str(path)))


def _context(context: RankContext, following: NextMembership, config: JobConfig) -> RankContext:
    rank = following.rank_on(context.node, context.local_rank)
    assert rank is not None, (
        f"rank {context.local_rank} of node {context.node} is not in the membership {following.summary()}"
    )
    return replace(
        context,
        rank=rank,
        world_size=following.world_size,
        num_nodes=config.launch.num_nodes,
        generation=following.generation,
        master_addr=following.master_addr,
        master_port=following.master_port,
        nodes=following.nodes,
        is_joining=False,
    )


def drain_experts(trainer: Trainer, leaving: Sequence[int]) -> None:
    """Move experts so that ranks on other nodes than ``leaving`` hold every one of them; collective."""
    placement, engine = trainer.placement, trainer.engine
    assert placement is not None, "without replicas no node can leave"
    staying = [rank for rank, node in enumerate(trainer.nodes) if node not in leaving]
    config = config_of(trainer.job, [trainer.nodes[rank] for rank in staying])
    moves = placement.evacuation(config, staying)
    # A pure function of what all ranks know: all return here, or none does.
    if moves is None:
        return
    trainer.context.worker.progress(engine.iteration + 1, "migrate")
    if trainer.snapshots is not None:
        trainer.snapshots.pause()
    trainer.move(moves, engine.iteration + 1, is_evacuation=True)
    placement.plans = [moves.placement]
    trainer.report_placement("evacuation")

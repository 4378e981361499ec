"""Moves to the next membership in the same processes: extracts state, forms groups again, restores state.

The experts that the lost ranks held come from copies among those that stay; all other state is whole on each of these.
Everything else stays each rank's own: random numbers continue where they were. Joining ranks, which have no state,
join the same groups and are given all of it.
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
from megatron_ft.snapshot.storage.checkpoints import directory_name


def reconfigure(trainer: Trainer, following: NextMembership, *, store: dist.Store | None = None) -> bool:
    """Continue ``trainer`` as a rank of ``following``, from the state after its target; collective over its ranks.

    The groups there are may be broken: nothing is sent through them. A joining rank's trainer has none.

    Args:
        store: that of ``following``, where it is open here already.

    Returns:
        Whether a checkpoint that was on its way has been given up.

    Raises:
        RecoveryError: no rank holds some state any more; it names what is missing. Or ranks would use different
            placements.
        DataError: a rank reads other data, and the others cannot survive without it.
        RuntimeError: the membership has not formed, for ranks were lost, or read other data. What was carried is kept.
        TrainingStopped: the iteration that is finished on the way stops the run.
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
    in_place = trainer.job.launch.keep_layout
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
    if carried is None:
        return False
    # Rank 0 may have just joined, and know nothing of the finished iteration.
    trainer.reporting_rank = _first(previous)
    owes_save = _account(trainer, carried, time.monotonic() - began)
    trainer.reporting_rank = 0
    return owes_save


def _join(trainer: Trainer, store: dist.Store | None) -> Groups:
    """Form the groups of the membership of ``trainer``; a lost rank aborts this as it aborts collectives."""
    failpoints.hit("reform_join", trainer.engine.iteration)
    opening = Opening()
    trainer.break_with(opening.hang_up)
    try:
        groups = join(
            trainer.config,
            trainer.context,
            device=trainer.device.type,
            timeout_seconds=trainer.config.launch.reform_timeout_seconds,
            store=store,
            opening=opening,
        )
    finally:
        opening.close()
    trainer.break_with(groups.transports.hang_up)
    return groups


def _present(trainer: Trainer, carried: Carried | None, groups: Groups) -> tuple[list[RankStatus | None], list[str]]:
    """Gather each rank's status (None of joining ranks) and the fingerprint of the samples that it reads."""
    mine = None if carried is None else RankStatus.of(carried.holdings).to_json()
    told = Collectives(groups.vote).gather([mine, trainer.samples["train"].fingerprint()])
    present = [None if found is None else RankStatus.from_json(found) for found, _ in told]
    return present, [fingerprint for _, fingerprint in told]


def _is_whole(carried: Carried | None, groups: Groups, key: Key, previous: Previous) -> bool:
    """Whether the ranks that have a holding hold every expert; collective. The first of them knows its placement."""
    first, missing = _first(previous), None
    if groups.vote.rank() == first:
        placement = _held(carried, key).placement
        missing = placement is not None and bool(lost_experts(placement.plans[0], previous))
    return not Collectives(groups.vote).from_rank(first, missing)


def _held(carried: Carried | None, key: Key) -> Holding:
    assert carried is not None, "a rank with a holding has state"
    return next(held for held in carried.holdings if held.key == key)


def _joining(nodes: Sequence[int], previous: Previous) -> tuple[int, ...]:
    """Nodes whose ranks are given their state."""
    return tuple(dict.fromkeys(node for node, rank in zip(nodes, previous, strict=True) if rank is None))


def _let_go(trainer: Trainer) -> None:
    """Release the present groups and all that holds them, as far as a joining or a broken rank has any."""
    trainer.placement = None
    if dist.is_initialized():
        trainer.teardown()
    dissolve_groups()


def _go_on(trainer: Trainer, carried: Carried | None, key: Key, previous: Previous, groups: Groups) -> None:
    """Move what ranks lack, and build and fill model and optimizer.

    Args:
        carried: None on a rank that has no part in the holding.
        key: of the holding that all continue from.
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
    """Note that from here on this rank can continue by the placement of this membership, if it breaks."""
    beginning, nodes = trainer.membership_start, tuple(trainer.nodes)
    assert beginning is not None, "the membership is forming"
    change = MembershipChange.between(held.nodes, nodes, _joining(nodes, previous), beginning.iteration + 1)
    changes = (*held.changes, change.to_text())
    # A run that a policy stops has the state before the iteration: nothing comes after it.
    trainer.membership_start = replace(beginning, changes=changes, is_formed=not is_stopped)


def _in_common(
    carried: Carried | None, key: Key, previous: Previous, groups: Groups
) -> tuple[TrainState, Holding, list[tuple[str, str, str, list[int]]] | None]:
    """Broadcast the common state and, where ranks join, the shapes of its tensors; collective."""
    # The same on every rank: all skip the broadcast, or none does.
    if None not in previous:
        assert carried is not None, "everybody has state"
        return carried.host, _held(carried, key), None
    record = None
    if carried is not None:
        about = {"host": carried.host.to_json(own=False), "held": _held(carried, key).to_json()}
        record = {**about, "shapes": shapes_of(carried.state)}
    told = Collectives(groups.vote).from_rank(_first(previous), record)
    host = TrainState.from_json(told["host"]) if carried is None else carried.host
    return host, Holding.from_json(told["held"]), told["shapes"]


def _first(previous: Previous) -> int:
    """The first rank that has state."""
    return next(rank for rank, former in enumerate(previous) if former is not None)


def _placement(trainer: Trainer, held: Holding, previous: Previous) -> tuple[PlacementManager, MigrationPlan]:
    assert held.placement is not None, "experts have places"
    found = PlacementManager.following(held.placement, trainer.config, previous)
    if isinstance(found, Declined):
        generation = trainer.context.generation
        raise RecoveryError(f"generation {generation} cannot continue from living ranks: {found.summary()}")
    return found


def _account(trainer: Trainer, carried: Carried, seconds: float) -> bool:
    """Report the iteration that was finished and the save that was given up on the way."""
    finished, carried.finished = carried.finished, None
    if finished is not None:
        trainer.account(finished, seconds, carried.batch)
    if carried.unsaved is not None:
        path = str(trainer.context.run_dir / "checkpoints" / directory_name(carried.unsaved))
        error = "ranks were lost while it was written; the state they continue with is saved instead"
        trainer.report(CheckpointFailed(iteration=carried.unsaved, error=error, path=path))
    return carried.unsaved is not None


def _context(context: RankContext, following: NextMembership, config: JobConfig) -> RankContext:
    rank = following.rank_on(context.node, context.local_rank)
    assert rank is not None, f"rank {context.local_rank} of node {context.node} is not of {following.summary()}"
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

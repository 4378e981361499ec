"""Recovery with the same layout: stages that lack a rank's state replay, the others send logged messages and wait.

The plan comes from ``planning/recovery/localized.py``. A healthy stage restores the state that it carried and computes
nothing. A region of stages loads the newest committed window and runs the later iterations again. Inside the region,
ranks communicate as usual; at its edges they read the logs of the neighbours. Ranks of the region that had the state
after the target compare it with the result of the replay, so a recovery that differs is detected.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_ft import failpoints
from megatron_ft.errors import RecoveryError
from megatron_ft.events import RecoveryStarted, StageRecovery
from megatron_ft.mcore.groups import Groups
from megatron_ft.mcore.optimizer import commit
from megatron_ft.mcore.optimizer.build import set_position
from megatron_ft.mcore.pipeline.communicator import serve
from megatron_ft.mcore.recovery.region import Region, form_region_groups
from megatron_ft.mcore.snapshot.client import open_snapshot_client, share_addresses, take_snapshots
from megatron_ft.mcore.state.carried import Carried, MembershipStart
from megatron_ft.mcore.state.tensors import put_state, take_state
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.localized import RUNG as LOCALIZED
from megatron_ft.planning.recovery.localized import LocalizedPlan, Standing, plan_localized
from megatron_ft.planning.recovery.replicas import Declined
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.server.client import KeeperClient

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer


def recover_localized(trainer: "Trainer", carried: Carried | None, groups: Groups, target: int) -> None:
    """Bring every rank to the state of the target; collective.

    Args:
        carried: this rank's state; None on a rank without state.
        target: iteration after which the membership begins. The state is that of the target or, if the iteration after
            it stops the run, of that one.

    Raises:
        RecoveryError: this strategy cannot recover, or a replay gave another result.
    """
    trainer.use(groups)
    plan, standings = _decide(trainer, carried, groups)
    trainer.report(RecoveryStarted(generation=trainer.context.generation, strategy=LOCALIZED, iteration=plan.target))
    state, votes, window_plan = _share(trainer, carried, plan, standings)
    failpoints.hit("reform_build", target)
    engine = trainer.engine
    engine.iteration, engine.newest_vote, engine.in_progress = plan.target, state.newest_vote, None
    engine.build(groups)
    trainer.context = share_addresses(trainer.context, trainer.collectives)
    client = open_snapshot_client(trainer)
    assert client is not None, "recovery.keep_layout needs a snapshot.policy"
    failpoints.hit("reform_move", target)
    kept = _recover(trainer, carried, plan, standings, client, votes, window_plan)
    assert engine.iteration == plan.target, f"the recovery ended at iteration {engine.iteration}, not {plan.target}"
    engine.newest_vote = state.newest_vote
    # A save or an evaluation that was due may be done on some ranks only: each keeps what it has done.
    trainer.rounded_off = state.rounded_off if carried is None else carried.host.rounded_off
    set_position(engine.scheduler, plan.target * trainer.config.training.global_batch_size)
    if carried is not None:
        carried.kept = plan.window
    resumed = None if kept is None or window_plan is None else (kept, window_plan)
    trainer.snapshots = take_snapshots(trainer, client, resumed)
    vote = votes.get(plan.target)
    # The recovery has dropped the window in progress: without this, the next failure would go back as far again.
    if resumed is not None and vote is not None and kept is not None and kept.start_iteration < plan.target:
        trainer.snapshots.capture_whole(vote)
    trainer.membership_start = MembershipStart(iteration=target, carried=carried or Carried.of(trainer))
    if carried is None and state.stopped is not None:
        trainer.stop(plan.target + 1, state.stopped)


def _decide(trainer: "Trainer", carried: Carried | None, groups: Groups) -> tuple[LocalizedPlan, list[Standing]]:
    log, pp = trainer.engine.boundaries.log, groups.pg_collection.pp
    mine = Standing(
        stage=pp.rank(),
        iteration=None if carried is None else carried.host.iteration,
        window=None if carried is None else carried.kept,
        logged=() if log is None else log.iterations,
        voted=() if log is None else tuple(sorted(log.votes)),
    )
    standings = [Standing.from_json(record) for record in trainer.collectives.gather(mine.to_json())]
    is_ring = trainer.config.parallel.virtual_pipeline_model_parallel_size is not None
    plan = plan_localized(standings, num_stages=pp.size(), is_ring=is_ring)
    if isinstance(plan, Declined):
        raise RecoveryError(
            f"generation {trainer.context.generation} cannot recover by localized replay: {plan.summary()}"
        )
    return plan, standings


def _share(
    trainer: "Trainer", carried: Carried | None, plan: LocalizedPlan, standings: Sequence[Standing]
) -> tuple[TrainState, dict[int, Vote], WindowPlan | None]:
    """Broadcast state besides tensors, the logged votes and the plan of windows (None before the first); collective.

    The sender is ``LocalizedPlan.voter``. Others use only the part of the state that is the same on every rank: a
    replay computes buffers and generators.
    """
    # The same choice on every rank, from the same reports.
    first = plan.voter(standings)
    log, mine = trainer.engine.boundaries.log, None
    if carried is not None:
        mine = {
            "state": carried.host.to_json(own=False),
            "votes": [] if log is None else [vote.to_record() for vote in log.votes.values()],
            "plan": None if carried.plan is None else carried.plan.to_json(),
        }
    shared = trainer.collectives.from_rank(first, mine)
    votes = [Vote.from_record(record) for record in shared["votes"]]
    window_plan = None if shared["plan"] is None else WindowPlan.from_json(shared["plan"])
    return TrainState.from_json(shared["state"]), {vote.iteration: vote for vote in votes}, window_plan


def _recover(
    trainer: "Trainer",
    carried: Carried | None,
    plan: LocalizedPlan,
    standings: Sequence[Standing],
    client: KeeperClient,
    votes: dict[int, Vote],
    window_plan: WindowPlan | None,
) -> StoredWindow | None:
    # Bring this rank to the target and report its part; return the window to which it could return from there.
    engine, pp = trainer.engine, trainer.engine.pg.pp
    began, started, forwards = time.time(), time.monotonic(), engine.num_forward_passes
    requests: list[Any] = []
    num_bytes, kept, error = 0, None, None
    try:
        region = plan.region_of(pp.rank())
        circle = form_region_groups(trainer, plan, [standing.stage for standing in standings])
        if region is None or circle is None:
            assert carried is not None, "a rank outside the replaying regions has no state"
            # Sending begins before this rank restores its own state: the region waits for the first message.
            requests, num_bytes = _serve(trainer, plan)
            kept = _put_back(trainer, carried, plan, client)
        else:
            replayed = Region(trainer, plan, region, circle, client).replay(votes, window_plan)
            num_bytes, kept = replayed.num_bytes, replayed.kept
            _compare(trainer, carried)
    except RecoveryError as failure:
        error = str(failure)
    # Every rank comes here, also one that failed: the others wait for it in this collective.
    error = trainer.collectives.errors(error)
    if error is not None:
        raise RecoveryError(f"generation {trainer.context.generation}: the localized replay failed: {error}")
    # The sends read the log's own memory: training must not log over it before they are done.
    for request in requests:
        request.wait()
    is_healthy = region is None
    trainer.context.worker.report(
        StageRecovery(
            generation=trainer.context.generation,
            rank=trainer.context.rank,
            stage=pp.rank(),
            role="replays" if not is_healthy else "serves" if plan.serves(pp.rank()) else "waits",
            start_iteration=plan.target if is_healthy or plan.window is None else plan.window.start_iteration,
            iteration=plan.target,
            num_iterations=0 if is_healthy else len(plan.iterations),
            num_forward_passes=engine.num_forward_passes - forwards,
            bytes_moved=num_bytes,
            began_unix_seconds=began,
            seconds=time.monotonic() - started,
        ).to_record()
    )
    return kept


def _serve(trainer: "Trainer", plan: LocalizedPlan) -> tuple[list[Any], int]:
    engine = trainer.engine
    requests, num_bytes = [], 0
    for direction, _ in plan.serves(engine.pg.pp.rank()):
        log = engine.boundaries.log
        assert log is not None, "a rank that serves its upstream log has none"
        rank = engine.p2p.next_rank if direction == "forward" else engine.p2p.prev_rank
        begun, size = serve(log, engine.pg.pp, direction, rank, plan.iterations)
        requests += begun
        num_bytes += size
    return requests, num_bytes


def _put_back(trainer: "Trainer", carried: Carried, plan: LocalizedPlan, client: KeeperClient) -> StoredWindow | None:
    engine = trainer.engine
    put_state(engine.model_chunks, engine.optimizer, carried.state)
    engine.restore(carried.host)
    # An iteration that was finished on the way out has updated this rank's shard of the parameters only.
    commit.gather(engine.optimizer, engine.model_chunks)
    if plan.window is None:
        return None
    key = plan.window
    for found in client.inventory(trainer.context.rank):
        if found.where == "own" and found.complete and found.key == key:
            return found
    # The window is with peers only: nothing of this rank's memory has to be kept for it.
    return StoredWindow(
        start_iteration=key.start_iteration, generation=key.generation, num_slices=0, num_held=0, where="copy"
    )


def _compare(trainer: "Trainer", carried: Carried | None) -> None:
    """Compare the replayed state with the previous state of this rank.

    Raises:
        RecoveryError: they differ.
    """
    if carried is None:
        return
    now = take_state(trainer.engine.model_chunks, trainer.engine.optimizer)
    # An iteration that was finished alone has updated this rank's shard only: its other weights are of the one before.
    names = [name for name in now if "/" in name or carried.has_whole_weights]
    other = [name for name in names if not _same_bits(now[name], carried.state[name])]
    other += trainer.engine.train_state().differences(carried.host)
    if other:
        rank, shown = trainer.context.rank, ", ".join(other[:3])
        raise RecoveryError(
            f"rank {rank}: the replay gave another state than before the failure: {len(other)} tensors differ: {shown}"
        )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)

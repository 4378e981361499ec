"""From one membership to the next in the same processes: state is carried out, groups are formed anew, state put back.

The experts that the lost ranks held come from copies among the survivors; all other state is whole on every rank. What
is not state of the job stays each rank's own: random numbers go on where they were.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from megatron_ft import failpoints
from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.job import JobConfig
from megatron_ft.control.worker import RankContext
from megatron_ft.errors import RecoveryError
from megatron_ft.events import CheckpointFailed, MembershipChanged
from megatron_ft.mcore.groups import dissolve_groups, join
from megatron_ft.mcore.loop.migration import move_experts
from megatron_ft.mcore.loop.placing import PlacementKeeper
from megatron_ft.mcore.loop.settling import settle
from megatron_ft.mcore.loop.trainer import Trainer
from megatron_ft.mcore.loop.undo import UndoRecord
from megatron_ft.mcore.optimizer.state_view import NamedState, put_state, take_state
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.replicas import Declined
from megatron_ft.runtime.storage.checkpoints import directory_name


def reform(trainer: Trainer, following: NextMembership, *, store: dist.Store | None = None) -> bool:
    """Make ``trainer`` go on as a rank of ``following``, from the state after its target; collective over its ranks.

    The groups there are may be broken: nothing is sent through them.

    Args:
        store: that of ``following``, in its rank 0 where it is open already.

    Returns:
        Whether a checkpoint that was on its way has been given up.

    Raises:
        RecoveryError: the survivors do not hold the whole state; it names what is missing. Nothing has changed then
            but the iteration under way, which is settled.
    """
    began = time.monotonic()
    engine, placement = trainer.engine, trainer.placement
    assert placement is not None, "without replicas nobody can be lost"
    finished = settle(engine, following.target)
    if finished is not None:
        trainer.observe(finished)
    former = _state_of_former_placement(trainer, placement)
    config = config_of(trainer.job, following.nodes)
    found = placement.following(config, following.previous_ranks)
    if isinstance(found, Declined):
        raise RecoveryError(f"generation {following.generation} cannot go on from living ranks: {found.summary()}")
    keeper, migration = found

    state = {**take_state(engine.model_chunks, engine.optimizer), **former}
    volatile = UndoRecord.take(engine.model_chunks, engine.optimizer)
    batch, unsaved = engine.batch, trainer.checkpoints.pending_iteration
    trainer.teardown()
    dissolve_groups()

    context = _context(trainer.context, following, config)
    failpoints.enter(following.generation)
    timeout_seconds = config.launch.reform_timeout_seconds
    groups = join(config, context, device=trainer.device.type, timeout_seconds=timeout_seconds, store=store)
    move_experts(state, migration, groups.pg_collection.ep)
    trainer.config = engine.config = config
    trainer.context, trainer.placement, trainer.nodes = context, keeper, following.nodes
    trainer.use(groups)
    engine.build(groups, keeper.replicas())
    put_state(engine.model_chunks, engine.optimizer, state)
    engine.restore(volatile)
    trainer.keep_copies()

    seconds = time.monotonic() - began
    nodes = tuple(sorted(set(following.nodes)))
    trainer.report(
        MembershipChanged(
            generation=following.generation,
            world_size=following.world_size,
            nodes=nodes,
            reason=following.reason,
            iteration=engine.iteration,
            seconds=seconds,
        )
    )
    trainer.report_placement("membership")
    if finished is not None:
        trainer.account(finished, seconds, batch)
    if unsaved is not None:
        path = str(context.run_dir / "checkpoints" / directory_name(unsaved))
        error = "ranks were lost while it was written; the state they go on with is saved instead"
        trainer.report(CheckpointFailed(iteration=unsaved, error=error, path=path))
    return unsaved is not None


def _state_of_former_placement(trainer: Trainer, placement: PlacementKeeper) -> NamedState:
    """State of experts given away for a placement that no iteration has been committed with: the one before holds."""
    former, trainer.former = trainer.former, None
    if former is None or trainer.engine.iteration >= former.before_iteration:
        return {}
    placement.plans = former.plans
    return former.state


def _context(context: RankContext, following: NextMembership, config: JobConfig) -> RankContext:
    rank = following.new_rank(context.rank)
    assert rank is not None, f"rank {context.rank} does not go on"
    return replace(
        context,
        rank=rank,
        world_size=following.world_size,
        num_nodes=config.launch.num_nodes,
        generation=following.generation,
        master_addr=following.master_addr,
        master_port=following.master_port,
    )


def config_of(job: JobConfig, nodes: Sequence[int]) -> JobConfig:
    """``job`` for the ranks on ``nodes`` alone (numbers since the job began, one for each rank).

    Their failure domains keep their names. Copies are asked for on as many domains as there are.
    """
    launch, remaining = job.launch, sorted(set(nodes))
    names = launch.failure_domains or [f"node{node}" for node in range(launch.num_nodes)]
    domains = [names[node] for node in remaining]
    return derive_placement(
        replace(
            job,
            launch=replace(launch, num_nodes=len(remaining), failure_domains=domains),
            parallel=replace(job.parallel, expert_model_parallel_size=1),
            placement=replace(job.placement, min_replicas=min(job.placement.min_replicas, len(set(domains)))),
        )
    )

"""Trains through as many memberships as a run has: ranks that are lost, and ranks that leave as a schedule says."""

import traceback
from collections import deque

import torch.distributed as dist

from megatron_ft.config.membership_schedule import MembershipChange, parse_membership_change
from megatron_ft.errors import ConfigError, RecoveryError
from megatron_ft.mcore.loop.reforming import reform
from megatron_ft.mcore.loop.settling import position_of
from megatron_ft.mcore.loop.trainer import Trainer
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Target


def run_memberships(trainer: Trainer) -> None:
    """Train to the end of the run, or until a schedule has this rank leave.

    Raises:
        MegatronFtError: what ``Trainer.run`` raises; RecoveryError where the survivors of a loss lack state;
            ControlError where the job ends; ConfigError where this run cannot lose nodes.
    """
    changes = _scheduled(trainer)
    owes_save = False
    while True:
        _listen(trainer)
        failure = _attempt(trainer, changes[0].before_iteration if changes else None, owes_save=owes_save)
        if failure is not None:
            following, store = _survive(trainer, failure), None
        elif trainer.ended:
            return
        else:
            planned = _planned(trainer, changes.popleft())
            if planned is None:
                return
            following, store = planned
        owes_save = reform(trainer, following, store=store)


def _scheduled(trainer: Trainer) -> deque[MembershipChange]:
    """The changes that the job asks for, in order: the configuration has them rise.

    Raises:
        ConfigError: one should have come already, or connections of this device cannot be broken.
    """
    launch, iteration = trainer.job.launch, trainer.engine.iteration
    if trainer.device.type != "cpu" and (launch.may_lose_nodes or launch.membership_schedule):
        key = "launch.min_nodes" if launch.may_lose_nodes else "launch.membership_schedule"
        value = launch.min_nodes if launch.may_lose_nodes else launch.membership_schedule
        raise ConfigError.of(
            key, value, f"must be left out on {trainer.device.type}: only gloo's ranks can be lost yet"
        )
    changes = deque(map(parse_membership_change, launch.membership_schedule))
    if changes and changes[0].before_iteration <= iteration:
        reason = f"must begin after iteration {iteration}, which the run continues from with all nodes"
        raise ConfigError.of("launch.membership_schedule", launch.membership_schedule, reason)
    return changes


def _attempt(trainer: Trainer, before: int | None, *, owes_save: bool) -> str | None:
    """Train in the membership there is; the traceback of what broke it.

    Nothing of the exception is kept: its frames hold process groups, which are to be dissolved.

    Args:
        owes_save: a save was given up here when the membership before ended; one is made of the present state.
    """
    try:
        if trainer.context.generation > 0 and trainer.agreement.any(owes_save):
            trainer.save()
        trainer.run(before=before)
    except RuntimeError:  # of a collective, of a kernel: errors of this project's own are meant for everybody
        if not trainer.context.worker.can_survive:
            raise
        return traceback.format_exc()
    return None


def _listen(trainer: Trainer) -> None:
    """Let the control plane hang up for this rank while it waits for a healthy peer."""
    worker, transports = trainer.context.worker, trainer.engine.groups.transports
    if worker.can_survive:
        worker.on_break(transports.hang_up)


def _survive(trainer: Trainer, failure: str) -> NextMembership:
    trainer.engine.groups.transports.hang_up()
    try:
        position = position_of(trainer.engine, trainer.context.rank)
    except RecoveryError as error:
        raise RecoveryError(f"{error}:\n{failure}") from None
    return trainer.context.worker.survive(position, failure)


def _planned(trainer: Trainer, change: MembershipChange) -> tuple[NextMembership, dist.Store | None] | None:
    """The membership after ``change``, and its store in the rank that serves it; None for a rank that leaves."""
    context, nodes = trainer.context, trainer.nodes
    staying = tuple(rank for rank, node in enumerate(nodes) if node not in change.nodes)
    trainer.checkpoints.finish()
    store = None
    if staying and context.rank == staying[0]:
        store = dist.TCPStore(context.master_addr, 0, len(staying), is_master=True, wait_for_workers=False)
    ports = trainer.agreement.gather(None if store is None else store.port)
    if context.rank not in staying:
        return None
    following = NextMembership(
        generation=context.generation + 1,
        previous_ranks=staying,
        nodes=tuple(nodes[rank] for rank in staying),
        target=Target(iteration=trainer.engine.iteration, vote=None),
        master_addr=context.master_addr,
        master_port=ports[staying[0]],
        reason=f"scheduled: nodes {list(change.nodes)} leave before iteration {change.before_iteration}",
    )
    following.validate()
    return following, store

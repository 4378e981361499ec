"""Asks each recovery strategy for its cost after a loss of nodes, and chooses the best strategy. Also computes the
costs that a ``dry_run`` prints."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, config_of
from megatron_ft.planning.placement.layout import Holdings
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.stage import StageRequest, algorithm_of
from megatron_ft.planning.recovery.checkpoint import Checkpoint, StartOver
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.living_state import LivingState, why_no_replicas
from megatron_ft.planning.recovery.localized_replay import LocalizedReplay
from megatron_ft.planning.recovery.rollback import Rollback
from megatron_ft.planning.recovery.strategy import Cost, Loss, Place, Stored, Strategy
from megatron_ft.planning.state.declined import Declined

STRATEGIES: tuple[Strategy, ...] = (LivingState(), LocalizedReplay(), Rollback(), Checkpoint(), StartOver())
"""All recovery strategies. ``cost_of_loss`` explains which strategy recovers from a loss."""
MAX_PLANNED_NODES = 16
"""Number of nodes for which ``costs_of_nodes`` plans the placement after the loss of the node: the first ones in order.
For the loss of any other node, the bytes of experts that move are not computed."""


def cost_of_loss(
    facts: RecoveryFacts,
    lost: Iterable[int],
    *,
    is_gone: bool = True,
    ends_job: bool = False,
    place: Place | None = None,
    stored: Stored | None = None,
) -> Cost:
    """Return the cost of losing all nodes in ``lost`` at the same time, with the best possible strategy.

    First, the strategies that keep the surviving processes and all committed iterations are compared. The best of these
    has the shortest predicted time. If none of them is possible, ranks load saved state with the first strategy in
    ``STRATEGIES`` that is possible. ``Loss`` describes the arguments.

    Raises:
        ConfigError: ``lost`` contains a node that is not present.
    """
    loss = Loss.of(facts, lost, is_gone=is_gone, ends_job=ends_job, place=place, stored=stored)
    found = [_cost_by(strategy, loss, facts) for strategy in STRATEGIES]
    costs = [cost for cost in found if isinstance(cost, Cost)]
    assert costs, "every strategy declined, although a job can always start over"
    keeping = [cost for cost in costs if cost.keeps_processes]
    # ``min`` takes the first of equal costs. A time that is not known counts as the longest.
    best = min(keeping, key=lambda cost: inf if cost.seconds is None else cost.seconds) if keeping else costs[0]
    earlier = found[: found.index(best)]
    declined = tuple(reason for reason in earlier if isinstance(reason, Declined))
    cost = replace(best, declined=(*declined, *best.declined))
    cost.validate()
    return cost


def _cost_by(strategy: Strategy, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
    found, recovery = strategy.cost(loss, facts), facts.config.recovery
    if isinstance(strategy, StartOver) or recovery.may_use(strategy.name):
        return found
    # ``recovery.strategies`` limits only what a job does by itself. A user who starts it again may use any saved state.
    if isinstance(found, Cost) and not found.is_automatic:
        return found
    return Declined(
        strategy=strategy.name, reason=f"not chosen: recovery.strategies=[{','.join(recovery.strategies or ())}]"
    )


def costs_of_nodes(facts: RecoveryFacts, inputs: JobInputs) -> tuple[Cost, ...]:
    """Return the cost of losing each present node alone. If the job restarts ranks, the cost of the death of all ranks
    follows. If snapshot servers outlive the job, the cost of the death of all other processes of the job follows."""
    wanted = placer(facts.config, inputs)
    gone = tuple(
        cost_of_loss(facts, [node], place=wanted if position < MAX_PLANNED_NODES else None)
        for position, node in enumerate(facts.nodes)
    )
    ranks_only = [cost_of_loss(facts, facts.nodes, is_gone=False)] if facts.config.recovery.max_restarts else []
    outlives = facts.config.snapshot.outlive_job_seconds > 0
    job = [cost_of_loss(facts, facts.nodes, is_gone=False, ends_job=True)] if outlives else []
    return (*gone, *ranks_only, *job)


def placer(config: JobConfig, inputs: JobInputs, loads: Sequence[Sequence[Sequence[float]]] | None = None) -> Place:
    """Return a function that plans the placement of experts on the survivors from ``loads`` [stages][layers][experts].
    If ``loads`` is None, the function uses the loads with which the job starts."""

    def place(nodes: tuple[int, ...], stage: int, held: Holdings) -> PlacementPlan:
        remaining = config_of(config, nodes)
        request = StageRequest.of_job(remaining)[stage]
        wanted = request.first_loads(remaining, inputs) if loads is None else loads[stage]
        return request.place(algorithm_of(remaining), wanted, held)[0]

    return place


def idle_copies(config: JobConfig) -> tuple[str, ...]:
    """Return notes on copies that the job stores on other nodes although no recovery from a lost node uses them."""
    notes = []
    if config.placement.state_copies is not None and why_no_replicas(config):
        copies = f"placement.state_copies={config.placement.state_copies}"
        notes.append(f"{copies}: no recovery uses these copies; they only cost memory and time")
    if config.snapshot.policy is not None and config.snapshot.num_peer_copies and not config.recovery.keep_layout:
        after = "the loss of a node ends the job, and windows in memory are lost with the job"
        if config.snapshot.outlive_job_seconds:
            after = "after the loss of a node a new start may use them (snapshot.outlive_job_seconds)"
        if not why_no_replicas(config):
            after = "after the loss of a node the job uses replicas or a dense checkpoint instead"
        copies = f"snapshot.num_peer_copies={config.snapshot.num_peer_copies}"
        notes.append(f"{copies}: a running job uses peer copies only if a node's own window is damaged; {after}")
    return tuple(notes)


def windows_serve(config: JobConfig) -> str:
    """Describe the failures after which the job can recover from its snapshot windows."""
    recovery, snapshot = config.recovery, config.snapshot
    served = []
    if recovery.keep_layout:
        served.append("the loss of a rank or a node (recovery.keep_layout=true)")
    if recovery.max_restarts and recovery.may_use("rollback"):
        served.append(f"the death of ranks on running nodes (recovery.max_restarts={recovery.max_restarts})")
    if snapshot.outlive_job_seconds:
        seconds = f"snapshot.outlive_job_seconds={snapshot.outlive_job_seconds}"
        served.append(f"the death of the whole job: run.resume on the same nodes within the time {seconds}")
    if snapshot.persist_interval_windows:
        served.append("the end of the job: run.resume with the same number of ranks loads persisted windows")
    restarts = f"recovery.max_restarts={recovery.max_restarts}"
    unused = restarts if recovery.may_use("rollback") else "recovery.strategies does not contain rollback"
    unset = f"{unused}, snapshot.persist_interval_windows=0 and snapshot.outlive_job_seconds=0"
    return "; ".join(served) or f"no failure: {unset}"

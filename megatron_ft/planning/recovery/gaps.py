"""Finds nodes whose loss ends the job or costs committed iterations, and changes of keys that improve this recovery.

Candidate changes follow from the requirements of recovery strategies. Each candidate is applied to the configuration,
which is then validated as usual. After that, ``cost_of_loss`` computes the costs of the same losses again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, derive_placement
from megatron_ft.config.requirements import KEPT_LAYOUT, LIVING_PLACES, REQUIREMENTS, KeyChange, Requirement
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.stage import StageRequest, first_plans
from megatron_ft.planning.recovery.costs import cost_of_loss
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.strategy import Cost
from megatron_ft.planning.snapshot.report import SnapshotReport

_SHOWN_NODES = 8
_SAVE_INTERVAL = 100
"""Proposed number of iterations between two dense checkpoints."""
_ON_REPLACED_NODES = "rollback on replaced nodes"
"""Name of the strategy ``rollback`` with ``recovery.keep_layout``: all ranks restart on spare or restarted nodes."""
_ON_REPLACED_RANKS = "living_state on replaced nodes"
"""Name of the strategy ``living_state`` with ``recovery.keep_layout``: new processes receive the lost ranks' state."""
_REQUIREMENTS = {**REQUIREMENTS, _ON_REPLACED_NODES: KEPT_LAYOUT, _ON_REPLACED_RANKS: LIVING_PLACES}
_STRATEGY = {_ON_REPLACED_NODES: "rollback", _ON_REPLACED_RANKS: "living_state"}
"""Name of the recovery strategy for each key of ``_REQUIREMENTS`` that is not itself the name of a strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Nodes whose loss ends the job or costs committed iterations, and the changes that improve the recovery most."""

    nodes: tuple[int, ...]
    """Nodes for which the loss of any single one ends the job or costs committed iterations."""
    changes: tuple[str, ...]
    """Command-line arguments that improve the recovery, e.g. ``recovery.min_nodes=3``; empty if none were found."""
    strategy: str
    """Description of the recovery with these changes; empty if no changes were found."""
    obstacles: tuple[str, ...]
    """Reasons why no change makes a strategy possible, one for each strategy; empty if changes were found."""

    def summary(self) -> str:
        """State in one line the changes that improve the recovery from the loss of a node, or why there are none."""
        listed = ", ".join(map(str, self.nodes[:_SHOWN_NODES]))
        more = f" and {len(self.nodes) - _SHOWN_NODES} more" if len(self.nodes) > _SHOWN_NODES else ""
        nodes = f"node {listed}" if len(self.nodes) == 1 else f"one of nodes {listed}{more}"
        if not self.changes:
            return f"no change of keys was found for the loss of {nodes}: {' '.join('; '.join(self.obstacles).split())}"
        return f"with {' '.join(self.changes)} the job would recover from the loss of {nodes} by {self.strategy}"


def find_gaps(config: JobConfig, costs: Sequence[Cost], inputs: JobInputs, vocab_size: int | None) -> tuple[Gap, ...]:
    """Find the changes of configuration keys that most improve the recovery from the loss of one node. The changes keep
    model, parallel layout and device. Memory limits are not checked here, but when the changed job is planned.

    Args:
        config: configuration before values are derived; ``training.device`` must not be ``auto``.
        costs: costs of losing nodes of the job, from ``costs_of_nodes``.
        vocab_size: number of entries of the tokenizer.
    """
    open_costs = [cost for cost in costs if cost.is_gone and not cost.keeps_processes]
    if not open_costs:
        return ()
    nodes = tuple(node for cost in open_costs for node in cost.lost_nodes)
    now = max(_badness(cost) for cost in open_costs)
    found: list[tuple[float, int, float, tuple[KeyChange, ...], str]] = []
    obstacles: list[str] = []
    for name in _REQUIREMENTS:
        changes = _changes(config, name)
        if isinstance(changes, str):
            obstacles.append(f"{name}: {changes}")
            continue
        tried = _try(config, changes, nodes, inputs, vocab_size)
        if isinstance(tried, str):
            obstacles.append(f"{name}: {tried}")
            continue
        worst = max(tried, key=_badness)
        if _badness(worst) < now:
            seconds = inf if worst.seconds is None else worst.seconds
            found.append((_badness(worst), len(changes), seconds, changes, replace(worst, stages=()).description))
    if not found:
        return (Gap(nodes=nodes, changes=(), strategy="", obstacles=tuple(obstacles)),)
    *_, best, strategy = min(found, key=lambda each: each[:3])
    return (Gap(nodes=nodes, changes=tuple(map(str, best)), strategy=strategy, obstacles=()),)


def _badness(cost: Cost) -> float:
    # 0: no committed iteration is lost. 1: iterations since a window in memory are lost. 2: iterations since older
    # saved state are lost. 3: the job ends. 4: all iterations are lost.
    if cost.keeps_processes:
        return 0
    if not cost.is_recoverable:
        return 4
    if not cost.is_automatic:
        return 3
    return 1 if cost.medium == "memory" else 2


def _changes(config: JobConfig, name: str) -> tuple[KeyChange, ...] | str:
    """Return the changes with which the strategy ``name`` can recover a lost node, or a text why there are none."""
    changed, changes = config, list[KeyChange]()
    if not config.recovery.may_use(_STRATEGY.get(name, name)):
        # Only this key is changed: ``recovery=auto`` would also replace other keys of the group.
        changes.append(KeyChange("recovery.strategies", None))
        changed = changes[0].apply(config)
    if name == _ON_REPLACED_NODES and changed.keeps_processes:
        changes.append(KeyChange("recovery.keep_processes", False))
        changed = changes[-1].apply(changed)
    # Two passes, because the change for one requirement can influence whether another requirement is met.
    for _ in range(2):
        for requirement in _REQUIREMENTS[name]:
            if requirement.is_met(changed):
                continue
            if requirement.remedy is None:
                return ", ".join(Requirement.unmet_values(changed, [requirement]))
            changes.append(requirement.remedy)
            changed = requirement.remedy.apply(changed)
    for change in _switches(changed, name):
        changes.append(change)
        changed = change.apply(changed)
    return tuple(changes)


def _switches(config: JobConfig, name: str) -> Iterator[KeyChange]:
    """Yield the changes of keys that the strategy ``name`` needs besides ``_REQUIREMENTS`` to recover a lost node."""
    num_nodes, recovery, placement = config.launch.num_nodes, config.recovery, config.placement
    num_domains = len(set(config.member_domains))
    match name:
        case "living_state":
            # With a kept layout, other nodes replace lost nodes, so the job need not continue on fewer nodes.
            if not recovery.keep_layout and (recovery.min_nodes is None or recovery.min_nodes > num_nodes - 1):
                yield KeyChange("recovery.min_nodes", num_nodes - 1)
            if placement.min_replicas < 2:
                yield KeyChange("placement.min_replicas", 2)
        case "localized_replay" | "rollback on replaced nodes" | "living_state on replaced nodes":
            if not recovery.keep_layout:
                yield KeyChange("recovery.keep_layout", True)
            if not config.nodes.num_spare_nodes and not config.nodes.restart_lost_nodes:
                yield KeyChange("nodes.num_spare_nodes", 1)
            if name == _ON_REPLACED_RANKS:
                if config.parallel.use_distributed_optimizer and (placement.state_copies or 1) < 2:
                    yield KeyChange("placement.state_copies", 2)
                return
            copies = config.snapshot.num_peer_copies
            if not copies or copies > num_domains - 1:
                yield KeyChange("snapshot.num_peer_copies", 1)
            if name == _ON_REPLACED_NODES and not recovery.max_restarts:
                yield KeyChange("recovery.max_restarts", 3)
        case "rollback":
            if not config.snapshot.persist_interval_windows:
                yield KeyChange("snapshot.persist_interval_windows", 1)
            if config.snapshot.num_peer_copies > num_domains - 1:
                yield KeyChange("snapshot.num_peer_copies", num_domains - 1)
        case "checkpoint":
            if not config.checkpoint.save_interval_iterations:
                # A short run saves ten times: a single save at its end would protect nothing.
                interval = min(_SAVE_INTERVAL, max(1, config.training.train_iterations // 10))
                yield KeyChange("checkpoint.save_interval_iterations", interval)


def _try(
    config: JobConfig, changes: Sequence[KeyChange], nodes: Sequence[int], inputs: JobInputs, vocab_size: int | None
) -> list[Cost] | str:
    """Return the cost of losing each of ``nodes`` alone after ``changes``, or why the new configuration is invalid."""
    changed = config
    for change in changes:
        changed = change.apply(changed)
    try:
        validate(changed)
        changed = derive_placement(changed)
        plans = []
        if changed.placement.algorithm is not None:
            plans = first_plans(changed, StageRequest.of_job(changed), inputs)
        facts = RecoveryFacts.of(changed, plans, SnapshotReport.of(changed, vocab_size))
    except ConfigError as error:
        return str(error)
    return [replace(cost_of_loss(facts, [node]), declined=()) for node in nodes]

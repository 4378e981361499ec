"""Determines which recovery strategies can use a checkpoint or window on storage, and why other strategies cannot.

If the configuration of a job is known, each strategy is asked for the cost of a loss of all processes, with the
checkpoint or window as the only saved state. Otherwise, only the kind and the defects of the saved state count.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_ft.config.job import JobConfig
from megatron_ft.planning.recovery.costs import STRATEGIES
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.strategy import Loss, SavedKind, Stored, Strategy
from megatron_ft.planning.state.declined import Declined

_NAMES: dict[SavedKind, str] = {
    "memory": "windows in the memory of nodes",
    "persisted": "windows on storage",
    "checkpoint": "dense checkpoints",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Whether a recovery strategy, or a key that starts a run, can use a checkpoint or window."""

    name: str
    """Name of the strategy or key, e.g. ``rollback`` or ``checkpoint.load``."""
    is_possible: bool
    reason: str
    """Description of how ranks use the checkpoint or window, or reason why they cannot; without a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A checkpoint or window on storage, as its manifest and metadata describe it."""

    kind: Literal["persisted", "checkpoint"] | None
    """Kind of saved state; None for other files, such as a Hugging Face folder."""
    what: str
    """Name of the saved state in texts, e.g. ``a dense checkpoint``."""
    iteration: int = 0
    """Iteration whose complete state ranks have after the recovery."""
    start_iteration: int = 0
    """Iteration of the first slice of a window."""
    num_ranks: int | None = None
    """Number of ranks that captured a window; None for a checkpoint, which any number of ranks can load."""
    loses_updates: bool = False
    """Whether a window leaves out experts, so that their newest updates are lost."""
    defect: str = ""
    """Defect because of which no strategy can use this state; empty without a defect."""


def uses_by_strategies(state: SavedState, facts: RecoveryFacts | None = None) -> tuple[Use, ...]:
    """Return for each recovery strategy except ``start_over`` whether it can use ``state``, in the order of
    ``STRATEGIES``.

    Args:
        facts: facts about the job that would load the state; None if its configuration is not known.
    """
    return tuple(_use(strategy, state, facts) for strategy in STRATEGIES if strategy.name != "start_over")


def _use(strategy: Strategy, state: SavedState, facts: RecoveryFacts | None) -> Use:
    reason = _why_not(strategy, state, facts)
    return Use(name=strategy.name, is_possible=not reason, reason=reason or _what_ranks_do(strategy, state, facts))


def _why_not(strategy: Strategy, state: SavedState, facts: RecoveryFacts | None) -> str:
    if not strategy.reads:
        return "uses the state of running ranks, and loads no files"
    if state.kind not in strategy.reads:
        return f"loads {' or '.join(_NAMES[kind] for kind in strategy.reads)}, and this is {state.what}"
    if state.defect or facts is None:
        return state.defect
    if state.num_ranks not in (None, facts.config.world_size):
        return (
            f"was captured by {state.num_ranks} ranks, and the job has {facts.config.world_size}: windows can only be "
            "loaded by the previous number of ranks"
        )
    found = strategy.cost(_loss_of_all(state, facts), facts)
    return found.reason if isinstance(found, Declined) else ""


def _loss_of_all(state: SavedState, facts: RecoveryFacts) -> Loss:
    is_window = state.kind == "persisted"
    stored = Stored(
        iteration=state.iteration,
        persisted_start=state.start_iteration if is_window else None,
        checkpoint=None if is_window else state.iteration,
    )
    return Loss.of(facts, facts.nodes, is_gone=False, ends_job=True, stored=stored)


def _what_ranks_do(strategy: Strategy, state: SavedState, facts: RecoveryFacts | None) -> str:
    if state.kind == "persisted":
        text = f"{state.num_ranks} ranks load it, and run iterations {state.start_iteration + 1} to {state.iteration}"
        text += " again" if state.iteration > state.start_iteration else ""
        if state.iteration == state.start_iteration:
            text = f"{state.num_ranks} ranks load it, and continue after iteration {state.iteration}"
        text += "; the newest updates of experts that it leaves out are lost" if state.loses_updates else ""
    else:
        text = f"any number of ranks load it, and continue after iteration {state.iteration}"
    return text + ("" if facts is None else _only_by_hand(strategy, facts.config))


def _only_by_hand(strategy: Strategy, config: JobConfig) -> str:
    # ``recovery.strategies`` limits only what a job does by itself.
    if config.recovery.may_use(strategy.name):
        return ""
    chosen = ",".join(config.recovery.strategies or ())
    return f"; only if a user starts the job again (recovery.strategies=[{chosen}])"

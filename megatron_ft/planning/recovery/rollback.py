"""Recovery strategy ``rollback``: all ranks go back to the newest committed window and replay from there.

The window is in the memory of the nodes, or on storage if it is no longer in memory. From memory, each rank loads its
part from its own node or, if that node was replaced, from a peer of the lost node. Windows in memory survive the end of
the job only if snapshot servers outlive the job. A window can only be loaded by as many ranks as captured it.
"""

from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.config.requirements import REQUIREMENTS, Requirement
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.strategy import NOT_RUNNING, Cost, Loss, Medium, SavedKind
from megatron_ft.planning.state.declined import Declined

_OTHER_SIZE = "ranks restart on fewer nodes, but windows can only be loaded by the previous number of ranks"
_NO_SNAPSHOTS = "snapshot.policy=null: no windows are captured"


@dataclass(frozen=True, slots=True)
class Rollback:
    """All ranks restart from the newest committed window, in memory or on storage."""

    name: ClassVar[str] = "rollback"
    requirements: ClassVar[tuple[Requirement, ...]] = REQUIREMENTS[name]
    reads: ClassVar[tuple[SavedKind, ...]] = ("memory", "persisted")

    def cost(self, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
        """Compute the cost of the recovery from memory; if it is impossible, from storage."""
        not_memory = _why_not_memory(loss, facts)
        if not not_memory:
            return self._cost_from("memory", loss, facts)
        not_persisted = _why_not_persisted(loss, facts)
        if not not_persisted:
            return self._cost_from(
                "persisted", loss, facts, Declined(strategy=self.name, reason=f"from memory: {not_memory}")
            )
        reasons = dict.fromkeys((not_memory, not_persisted))
        return Declined(strategy=self.name, reason="; ".join(reasons))

    def _cost_from(self, medium: Medium, loss: Loss, facts: RecoveryFacts, *declined: Declined) -> Cost:
        num_windows = 1 if medium == "memory" else facts.num_written_windows
        start = _start_of(medium, loss)
        again = facts.window_bound(num_windows)
        if loss.stored is not None:
            assert start is not None, f"the run has no window: {medium}"
            again = loss.stored.again_from(start)
        return Cost.of_restart(
            self.name,
            loss,
            facts,
            again,
            medium=medium,
            declined=declined,
            max_windows=num_windows + 1,
            # If an earlier start of the run wrote the window with another policy, the real loss can be smaller.
            loses_updates=facts.snapshot is not None and facts.snapshot.leaves_out_experts,
            update_loss="" if facts.snapshot is None else facts.snapshot.update_loss,
        )


def _why_not_newest(medium: Medium, loss: Loss, facts: RecoveryFacts) -> str:
    # As in ``RecoverySource.choose``, prefer a checkpoint that is as new as the window: it needs no replay.
    stored, start = loss.stored, _start_of(medium, loss)
    if stored is None or stored.checkpoint is None or start is None:
        return ""
    if loss.restart is not None and not facts.config.recovery.may_use("checkpoint"):
        return ""  # without this strategy, ranks that the job restarts ignore checkpoints
    last = stored.memory_last if medium == "memory" else stored.persisted_last
    size = None if facts.snapshot is None else facts.snapshot.window_iterations
    if last is None and size is not None:
        last = start + size - 1
    if last is None or stored.checkpoint < last:
        return ""
    return f"the checkpoint of iteration {stored.checkpoint} is at least as new as the newest window"


def _start_of(medium: Medium, loss: Loss) -> int | None:
    if loss.stored is None:
        return None
    return loss.stored.memory_start if medium == "memory" else loss.stored.persisted_start


def _why_not_memory(loss: Loss, facts: RecoveryFacts) -> str:
    if facts.snapshot is None:
        return _NO_SNAPSHOTS
    if not facts.is_running:
        return NOT_RUNNING
    if loss.restart == "fewer":
        return _OTHER_SIZE
    if loss.ends_job and not facts.config.snapshot.outlive_job_seconds:
        return "snapshot.outlive_job_seconds=0: windows in memory are lost with the job"
    if loss.is_gone and loss.restart is None and facts.config.snapshot.outlive_job_seconds:
        return (
            "the loss of a node ends the job; a new start can use the windows in the memory of other nodes "
            "(snapshot.outlive_job_seconds), but only if all of them are complete, which is not certain"
        )
    if loss.is_gone and loss.restart is None:
        return "the loss of a node ends the job, and windows in memory are lost with the job"
    if loss.is_gone and (alone := facts.without_copies(loss.nodes, loss.remaining)):
        return f"no remaining node has copies of the windows of nodes {alone}"
    # If the whole job ended, this job need not restart ranks: the next job takes over the snapshot servers.
    if loss.restart is None and not loss.ends_job:
        return "recovery.max_restarts=0: the job does not restart its ranks"
    if loss.stored is not None and loss.stored.memory_start is None:
        return "no window has been committed yet"
    return _why_not_newest("memory", loss, facts)


def _why_not_persisted(loss: Loss, facts: RecoveryFacts) -> str:
    is_there = _start_of("persisted", loss) is not None
    if facts.snapshot is None and (loss.restart == "fewer" or not is_there):
        return _NO_SNAPSHOTS
    if loss.restart == "fewer":
        return _OTHER_SIZE
    if is_there:
        return _why_not_newest("persisted", loss, facts)
    if not facts.config.snapshot.persist_interval_windows:
        return "snapshot.persist_interval_windows=0: a window is written to storage only when the run is asked to stop"
    if loss.stored is not None:
        return "no complete window is on storage yet"
    return ""

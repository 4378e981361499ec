"""The training loop of one rank: iterations, reports, evaluations, checkpoints, and when to stop."""

import os
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.config.present_nodes import config_of
from megatron_ft.control.node.worker_client import Abort, RankContext
from megatron_ft.corpus.check import resolve_vocab_size
from megatron_ft.errors import TrainingStopped
from megatron_ft.events import (
    Evaluation,
    IterationSkipped,
    LossSpike,
    RanksReady,
    Record,
    SnapshotProblem,
    StateDigest,
)
from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.checkpoint.state import DenseState
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.data.data_checks import check_same_data, job_identity, open_splits
from megatron_ft.mcore.groups import Groups
from megatron_ft.mcore.moe.migration import PreviousPlacement, migrate
from megatron_ft.mcore.moe.placement_manager import Change, PlacementManager
from megatron_ft.mcore.recovery.restart import recorded_placement, select_restore_source
from megatron_ft.mcore.recovery.upstream_log import keep_log, replay_window
from megatron_ft.mcore.snapshot.client import open_restorer, open_snapshot_client, take_snapshots
from megatron_ft.mcore.snapshot.local_window import replay_config
from megatron_ft.mcore.snapshot.snapshotter import Snapshotter
from megatron_ft.mcore.state.carried import MembershipStart
from megatron_ft.mcore.state.digest import state_digest
from megatron_ft.mcore.state.saving import extra_state, load, open_checkpoints
from megatron_ft.mcore.state.tensors import NamedState
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.mcore.training.iteration import IterationResult
from megatron_ft.mcore.training.reporting import (
    expert_load_record,
    metrics_record,
    placement_record,
    run_started,
)
from megatron_ft.planning.batch import BatchPlan
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.topology import Topology


class Trainer:
    """Drives a ``TrainingEngine`` through a run.

    Only rank 0 reports; every rank knows the reported values from the vote.
    """

    collectives: Collectives
    checkpoints: CheckpointManager

    def __init__(self, config: JobConfig, context: RankContext, *, device: torch.device, transformer_impl: str) -> None:
        self.job = config
        """The job's configuration, for all nodes at its start."""
        self.context = context
        self.nodes = context.nodes or tuple(rank // config.launch.ranks_per_node for rank in range(context.world_size))
        """Node of each rank; node numbers never change."""
        is_told = bool(context.nodes) and not context.is_joining
        is_other = is_told and tuple(dict.fromkeys(self.nodes)) != tuple(range(config.launch.num_nodes))
        self.config = config = config_of(config, self.nodes) if is_other else config
        """The configuration for the present ranks."""
        self.device = device
        self.samples = open_splits(config)
        self.identity = job_identity(config, context.run_dir, self.samples["train"])
        self.engine = TrainingEngine(
            config,
            device=device,
            transformer_impl=transformer_impl,
            vocab_size=resolve_vocab_size(config),
            samples=self.samples,
            stop_requested=context.worker.stop_requested,
        )
        self.placement: PlacementManager | None = None  # from when this rank has state on
        self.membership_start: MembershipStart | None = None
        """State at the begin of the membership, until it commits an iteration."""
        self.reporting_rank = 0
        self.hang_up: Abort = lambda _: None
        """Breaks the present connections to other ranks."""
        self.previous_placement: PreviousPlacement | None = None
        """The previous placement, until the first iteration with the new one is committed."""
        self.snapshots: Snapshotter | None = None
        self.ended = False
        """Whether the run has reached its end."""
        self.rounded_off = 0
        """Newest iteration after which all due work is done."""
        self.abandoned_saves: list[Path] = []
        """Directories of saves that were abandoned with their membership and are not yet reported."""
        self.is_save_due = False
        """Whether a save was abandoned and no later one has begun."""
        self.engine.wants_load = self._wants_load
        self.engine.change_requested = context.worker.change_requested

    # -- life ---------------------------------------------------------------------------------------------

    def replay_config(self) -> dict[str, Any]:
        """Return the settings that determine the results of an iteration of the present ranks."""
        return replay_config(
            self.config,
            self.samples["train"].fingerprint(),
            device=self.device.type,
            transformer_impl=self.engine.transformer_impl,
        )

    def anew(self) -> "Trainer":
        """Make another trainer of the same job, without state, with which a rank that has left joins later."""
        return Trainer(self.job, self.context, device=self.device, transformer_impl=self.engine.transformer_impl)

    def build(self, groups: Groups) -> None:
        """Build the engine on ``groups`` and load the state from which the run continues.

        Raises:
            CheckpointError: there is no checkpoint to resume from, or it does not fit.
            DataError: ranks read different data, or other data than the checkpoint was trained on.
        """
        started = time.monotonic()
        self.placement = self._placement_manager()
        self.use(groups)
        check_same_data(self.config, self.samples["train"], self.collectives)
        client = open_snapshot_client(self)
        restorer = open_restorer(self, client)
        source, window = select_restore_source(self.config, self.context, self.checkpoints, restorer)
        # Before the engine is built: the placement says which experts this rank has.
        if self.placement is not None and (source is not None or window is not None):
            self.placement.restore(recorded_placement(self.checkpoints, source, window))
        self.engine.build(groups, None if self.placement is None else self.placement.replicas())
        if source is not None:
            load(self, source)
        if window is not None:
            replay_window(self, restorer, window)
        # After the state is loaded: a start that cannot load it renames no window.
        restorer.set_aside_later(self.engine.iteration, is_new_job=self.context.generation == 0)
        self.engine.newest_vote = None  # what a replayed iteration was asked for, no one asks of this run
        self.rounded_off = self.engine.iteration
        self.keep_copies()
        origin = source if window is None else f"window of iteration {window.window.start_iteration}"
        resumed = None if origin is None else (str(origin), self.engine.iteration)
        self.report(run_started(self.config, self.context, self.device, resumed))
        if self.placement is not None:
            self.report_placement("resumed" if source is not None or window is not None else "first")
        # After the replay: memory for new windows may free that of the window which was just read.
        if client is not None:
            self.snapshots = take_snapshots(
                self, client, None if window is None else (window.stored, window.plan_in_force)
            )
        # Also a barrier: the job is ready once its slowest rank has loaded its state.
        process_ids = tuple(self.collectives.gather(os.getpid()))
        seconds = time.monotonic() - started
        self.report(RanksReady(seconds=seconds, world_size=self.context.world_size, process_ids=process_ids))

    def use(self, groups: Groups) -> None:
        """Use ``groups`` for agreements, saves and reports."""
        self.topology_record = asdict(Topology.of(self.config.parallel, self.context.world_size))
        self.collectives = Collectives(groups.vote)
        self.checkpoints = open_checkpoints(self, groups)
        failpoints.watch(self._tell_phase)

    def break_with(self, hang_up: Abort) -> None:
        """Register ``hang_up`` to break the connections to other ranks, also for the control plane when others are
        lost."""
        self.hang_up = hang_up
        if self.context.worker.can_survive:
            self.context.worker.on_break(hang_up)

    def run(self, *, before: int | None = None) -> None:
        """Train to the end, or to the iteration at which the vote orders a stop; ``ended`` is true then.

        If the vote orders a change of nodes, it returns earlier, after all due work is done.

        Args:
            before: iteration that belongs to the next membership; return before it.

        Raises:
            TrainingStopped: a policy stopped the run; the state before that iteration is saved.
        """
        training = self.config.training
        last = min(training.train_iterations, training.exit_at_iteration or training.train_iterations)
        # Evaluations and saves are collective: where one rank has not finished them, all repeat them.
        if self.collectives.any(self.rounded_off < self.engine.iteration):
            self.round_off(self.engine.iteration)
        while self.engine.iteration < last and not self._stop_is_voted():
            if self.engine.iteration + 1 == before or self._change_is_voted():
                return
            self.iterate(self.engine.iteration + 1)
        if self.config.checkpoint.save_at_end:
            self.save()
        self._digest(due=training.digest_interval_iterations > 0)
        self.checkpoints.finish()
        if self.snapshots is not None:
            self.snapshots.finish()
        self.ended = True

    def _stop_is_voted(self) -> bool:
        return self.engine.newest_vote is not None and self.engine.newest_vote.stop_requested

    def _change_is_voted(self) -> bool:
        vote = self.engine.newest_vote
        # A vote of an earlier membership asked for the change that has led to this one.
        return vote is not None and vote.change_requested and vote.generation == self.context.generation

    def teardown(self) -> None:
        """Release all existing objects that use the groups. Other ranks need not exist any more."""
        # First: a slice under way still reads tensors that the engine is about to free.
        if self.snapshots is not None:
            self.snapshots.close()
            self.snapshots = None
        self.engine.teardown()
        failpoints.watch(None)
        checkpoints: CheckpointManager | None = self.__dict__.pop("checkpoints", None)
        abandoned = None if checkpoints is None else checkpoints.abandon()
        if abandoned is not None:
            self.abandoned_saves.append(abandoned)
            self.is_save_due = True
        self.__dict__.pop("collectives", None)

    def _tell_phase(self, iteration: int, phase: str) -> None:
        if iteration > 0 or phase == "build":  # an evaluation passes the model as iteration 0
            self.context.worker.progress(iteration, phase)

    # -- one iteration ------------------------------------------------------------------------------------

    def iterate(self, iteration: int) -> None:
        """Run one iteration and the work that is due after it."""
        self._rebalance(iteration)
        began = time.perf_counter()
        result = self.engine.run_iteration(iteration)
        if result.decision.action != "stop":
            # A later loss cannot go back before this iteration: the states kept for that are freed.
            self.previous_placement = self.membership_start = None
        self.observe(result)
        seconds = time.perf_counter() - began
        self.account(result, seconds)
        if self.snapshots is not None:
            self.snapshots.after_iteration(iteration, result.vote, seconds)
            keep_log(self)
        self.round_off(iteration)
        if self.snapshots is not None and result.vote.stop_requested:
            self.snapshots.persist_newest()

    def round_off(self, iteration: int) -> None:
        """Evaluate, save and compare digests if due after ``iteration``."""
        self._evaluate(iteration)
        self.checkpoints.poll()
        if _due(iteration, self.config.checkpoint.save_interval_iterations):
            self.save()
        self._digest(due=_due(iteration, self.config.training.digest_interval_iterations))
        # Only now: a rank that breaks before this repeats all of it after the recovery.
        self.rounded_off = iteration

    def account(self, result: IterationResult, seconds: float, batch: BatchPlan | None = None) -> None:
        """Report an iteration (run in ``batch``, if not the present one); stop the run if the policy says so."""
        iteration, vote, decision = result.vote.iteration, result.vote, result.decision
        if _due(iteration, self.config.telemetry.log_interval_iterations):
            self.report(metrics_record(self.config, result, batch or self.engine.batch, seconds, self.nodes))
        if result.expert_load is not None and self._reports_load(iteration):
            self.report(expert_load_record(self.config, iteration, result.expert_load))
        if decision.spike:
            policy = self.config.training.loss_spike_policy
            self.report(LossSpike(iteration=iteration, loss=vote.loss, median=result.median_loss, policy=policy))
        if decision.action == "skip":
            values = {"loss": vote.loss, "grad_norm": vote.grad_norm, "loss_scale": vote.loss_scale}
            self.report(IterationSkipped(iteration=iteration, reason=decision.reason, values=values))
        if decision.action == "stop":
            self.stop(iteration, decision.reason)

    def stop(self, iteration: int, reason: str) -> None:
        """Save the present state and end the run.

        Raises:
            TrainingStopped: always.
        """
        self.save()
        self.checkpoints.finish()
        raise TrainingStopped(f"iteration {iteration}: {reason}")

    def _observers(self) -> list[PlacementManager | Snapshotter]:
        return [o for o in (self.placement, self.snapshots) if o is not None and o.needs_loads]

    def _reports_load(self, iteration: int) -> bool:
        return _due(iteration, self.config.telemetry.expert_load_interval_iterations)

    def _wants_load(self, iteration: int) -> bool:
        # The same on every rank: loads are summed over the job.
        return bool(self.config.model.num_moe_experts) and (self._reports_load(iteration) or bool(self._observers()))

    def observe(self, result: IterationResult) -> None:
        """Pass the iteration's loads to planners that need them."""
        if result.expert_load is not None:
            for observer in self._observers():
                observer.observe(result.expert_load)

    def _rebalance(self, iteration: int) -> None:
        change = None if self.placement is None else self.placement.change_before(iteration)
        if self.placement is None or change is None or iteration == 1:
            return
        self.context.worker.progress(iteration, "migrate")
        began = time.perf_counter()
        # Slices copy from fixed addresses, and a move builds new tensors.
        if self.snapshots is not None:
            self.snapshots.pause()
        self.move(self.placement.part_of(change), iteration)
        # After the move, which notes the plans in force as those to return to if it breaks.
        self.placement.adopt(change)
        self.keep_copies()
        self.report_placement(change.reason, change=change, seconds=time.perf_counter() - began)

    def move(self, migration: MigrationPlan, iteration: int, *, is_evacuation: bool = False) -> None:
        """Move experts before ``iteration``; this rank can return to the old placement until a later iteration is
        committed. Collective."""
        assert self.placement is not None, "the job has no expert placement"
        failpoints.hit("migrate", iteration)
        plans = self.placement.plans
        former = partial(PreviousPlacement, before_iteration=iteration, plans=plans, is_evacuation=is_evacuation)

        def keep(state: NamedState) -> None:
            self.previous_placement = former(state=state, host=self.engine.train_state())

        replicas = self.placement.replicas(migration.placement)
        # While experts move, all of this rank's state is kept; afterwards only that of the experts it has given away.
        self.previous_placement = former(state=migrate(self.engine, replicas, migration, keep=keep))

    def keep_copies(self) -> None:
        """Keep copies of optimizer state if configured, from the present state on."""
        plan = None if self.placement is None else self.placement.copy_plan()
        if plan is not None:
            self.engine.keep_copies(plan, self.placement.replicas().plan)

    def report_placement(self, reason: str, *, change: Change | None = None, seconds: float = 0.0) -> None:
        """Report the placement in force from the next iteration on, and write it to a file."""
        assert self.placement is not None, "the job has no expert placement"
        iteration, error = self.engine.iteration + 1, None
        if self.context.rank == 0:
            try:
                self.placement.write(self.context.run_dir / "placements" / f"iter_{iteration:07d}.json")
            except OSError as failure:
                # Training continues: checkpoints and windows have the placement too, the file is for people and tools.
                error = f"{type(failure).__name__}: {failure}"
        record = placement_record(iteration, self.placement, reason, change, seconds)
        self.report(replace(record, file_error=error))

    def _placement_manager(self) -> PlacementManager | None:
        if self.config.placement.algorithm is None:
            return None
        stage = Topology.of(self.config.parallel, self.context.world_size).coordinates(self.context.rank).pp
        return PlacementManager(self.config, world_size=self.context.world_size, stage=stage)

    def _evaluate(self, iteration: int) -> None:
        if "valid" not in self.samples or not _due(iteration, self.config.training.eval_interval_iterations):
            return
        self.context.worker.progress(iteration, "evaluation")
        began = time.perf_counter()
        loss, num_tokens = self.engine.evaluate()
        seconds = time.perf_counter() - began
        self.report(Evaluation(iteration=iteration, loss=loss, num_tokens=num_tokens, seconds=seconds))

    def _digest(self, *, due: bool) -> None:
        if due:
            mine = state_digest(self.engine.model_chunks, self.engine.optimizer)
            digests = tuple(self.collectives.gather(mine))
            self.report(StateDigest(iteration=self.engine.iteration, digests=digests))

    # -- checkpoints --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the present state unless that is done; a failed save of it is tried again."""
        iteration = self.engine.iteration
        # The same state is being written: only if that fails is it written again.
        if self.checkpoints.pending_iteration == iteration:
            self.checkpoints.finish()
        if iteration == 0 or self.checkpoints.last_saved_iteration == iteration:
            return
        self.context.worker.progress(iteration, "checkpoint")
        failpoints.hit("checkpoint", iteration)
        self.checkpoints.save(self.state(extra_state(self)), iteration)

    def state(self, extra: dict[str, Any]) -> DenseState:
        """Return the state that a checkpoint saves or a load fills, with ``extra``."""
        engine = self.engine
        return DenseState(
            model_chunks=engine.model_chunks,
            optimizer=engine.optimizer,
            scheduler=engine.scheduler,
            host=engine.train_state(),
            consumed_samples=engine.iteration * self.config.training.global_batch_size,
            extra=extra,
        )

    # -- reports ------------------------------------------------------------------------------------------

    def report(self, record: Record) -> None:
        """Report an event once for the job: from rank 0, or, after a recovery, from the first rank with state."""
        self.report_record(record.to_record())

    def report_own(self, record: Record) -> None:
        """Report a problem of this node from any rank; report other events once for the job."""
        if isinstance(record, SnapshotProblem):
            self.context.worker.report(record.to_record())
        else:
            self.report(record)

    def report_record(self, record: dict[str, Any]) -> None:
        """Report a record that consists of JSON values."""
        if self.context.rank == self.reporting_rank:
            self.context.worker.report(record)


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0

"""The training loop of one rank: iterations, reports, evaluations, checkpoints and stops."""

import os
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of
from megatron_ft.control.node.worker_client import Abort, RankContext
from megatron_ft.corpus.samples import resolve_vocab_size
from megatron_ft.errors import TrainingStopped
from megatron_ft.events import IterationSkipped, LossSpike, RanksReady, Record, SnapshotProblem, StateDigest
from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.checkpoint.state import DenseState
from megatron_ft.mcore.data.batches import check_known_data, check_same_data, job_identity, open_splits
from megatron_ft.mcore.groups import Collectives, Groups
from megatron_ft.mcore.moe.placement_manager import Change, PlacementManager, PreviousPlacement
from megatron_ft.mcore.optimizer.state_copies import StateCopies
from megatron_ft.mcore.recovery.restart import recorded_placement, select_restore_source
from megatron_ft.mcore.recovery.upstream_log import keep_log, replay_window
from megatron_ft.mcore.snapshot.local_window import LocalWindow, first_header, replay_config
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer, open_client
from megatron_ft.mcore.snapshot.snapshotter import Snapshotter
from megatron_ft.mcore.state.carried import MembershipStart
from megatron_ft.mcore.state.tensors import NamedState, SavedExperts, state_digest
from megatron_ft.mcore.state.train_state import IterationResult
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.mcore.training.reporting import (
    ProfilerWindow,
    Throughput,
    device_name,
    evaluation_record,
    expert_load_record,
    iteration_records,
    placement_record,
    run_started,
)
from megatron_ft.planning.iteration import BatchPlan
from megatron_ft.planning.placement.report import plan_shard_copies
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.memory import PeerAssignment
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.capture.capture import Header
from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.topology import Topology


class Trainer:
    """Runs the iterations of a ``TrainingEngine``, and the work between iterations. The vote gives all ranks the same
    values, so only one rank reports them, usually rank 0."""

    collectives: Collectives
    checkpoints: CheckpointManager

    def __init__(self, config: JobConfig, context: RankContext, *, device: torch.device, transformer_impl: str) -> None:
        self.job = config
        """The configuration with which the job was started, for all of its nodes."""
        self.context = context
        self.nodes = context.nodes or config.rank_places
        """Node number of each rank. The number of a node never changes."""
        is_told = bool(context.nodes) and not context.is_joining
        is_other = is_told and self.nodes != config.rank_places
        self.config = config = config_of(config, self.nodes) if is_other else config
        """The configuration for the nodes that train now."""
        self.device = device
        self.samples = open_splits(config)
        self.identity = job_identity(config, context.run_dir, self.samples["train"])
        vocab_size = resolve_vocab_size(config)
        self.throughput = Throughput.of(config, vocab_size, device_name(device))
        self.make_engine = partial(
            TrainingEngine,
            config,
            device=device,
            transformer_impl=transformer_impl,
            vocab_size=vocab_size,
            samples=self.samples,
            stop_requested=self._wants_stop,
            change_requested=context.worker.change_requested,
            wants_load=self._wants_load,
        )
        self.engine = self.make_engine()
        self.placement: PlacementManager | None = None  # set when this rank has state
        self.membership_start: MembershipStart | None = None
        """State at the start of the membership; None after the membership has committed an iteration."""
        self.reporting_rank = 0
        self.hang_up: Abort = lambda _: None
        """Function that shuts down the current connections to other ranks."""
        self.previous_placement: PreviousPlacement | None = None
        """The placement before the newest migration; None after an iteration with the new placement is committed."""
        self.placed_from = 0
        """First iteration that was committed with the present placement. Earlier windows have another placement."""
        self.snapshots: Snapshotter | None = None
        self.profiler = ProfilerWindow(config.telemetry, context.run_dir, self._report_here)
        self.ended = False
        """Whether this job has reached its last iteration, or a stop for which the ranks have voted."""
        self.is_complete = False
        """Whether the run is complete: all iterations are trained, or the job had only to evaluate."""
        self.rounded_off = 0
        """Newest iteration for which ``round_off`` (evaluation, checkpoint, digests) is complete."""
        self.abandoned_saves: list[Path] = []
        """Directories of saves that were abandoned at the end of a membership and are not reported yet."""
        self.is_save_due = False
        """Whether a save was abandoned, and no save has begun since then."""

    # -- life ---------------------------------------------------------------------------------------------

    def replay_config(self) -> dict[str, Any]:
        """Return the configuration that determines the results of an iteration; see ``local_window.replay_config``."""
        return replay_config(
            self.config,
            self.samples["train"].fingerprint(),
            device=self.device.type,
            transformer_impl=self.engine.transformer_impl,
        )

    def build(self, groups: Groups) -> None:
        """Build the engine on ``groups``, and load the state from which the run continues.

        Raises:
            CheckpointError: there is no checkpoint to resume from, or the checkpoint does not match this job.
            DataError: the ranks have different data, or other data than the checkpoint was trained on.
        """
        started = time.monotonic()
        self.placement = self._placement_manager()
        self.use(groups)
        check_same_data(self.config, self.samples["train"], self.collectives)
        client = self._open_snapshot_client()
        restorer = self.open_restorer(client)
        source, window = select_restore_source(self.config, self.context, self.checkpoints, restorer)
        # Restore the placement before the engine is built, because it determines which experts this rank has.
        if self.placement is not None and (source is not None or window is not None):
            self.placement.restore(recorded_placement(self.checkpoints, source, window), keeps_slots=window is not None)
        self.engine.build(groups, None if self.placement is None else self.placement.replicas())
        weights = self.config.checkpoint.load_weights
        if source is not None:
            self.load(source)
        elif window is None and weights is not None:
            self.checkpoints.load_weights(self.engine.model_chunks, self.engine.optimizer, Path(weights))
        if window is not None:
            replay_window(self.engine, restorer, window, self.report)
        # Rename windows only after the state is loaded, because a start that fails to load it must rename none.
        if not self.config.training.evaluate_only:
            restorer.set_aside_later(self.engine.iteration, is_new_job=self.context.generation == 0)
        # Drop the last vote: a request to stop in a replayed vote does not apply to this start of the run.
        self.engine.continue_after(self.engine.iteration, None)
        self.rounded_off = self.engine.iteration
        self.keep_copies()
        origin = source if window is None else f"window of iteration {window.window.start_iteration}"
        resumed = None if origin is None else (str(origin), self.engine.iteration)
        self.report(run_started(self.config, self.context, self.device, resumed, self.throughput))
        if self.placement is not None:
            self.report_placement("resumed" if source is not None or window is not None else "first")
        # Begin new windows only after the replay, because they may need the memory of the replayed window.
        if client is not None:
            self._continue_snapshots(client, window)
        # The gather is also a barrier: the job is ready when its slowest rank has loaded its state.
        process_ids = tuple(self.collectives.gather(os.getpid()))
        seconds = time.monotonic() - started
        self.report(RanksReady(seconds=seconds, world_size=self.context.world_size, process_ids=process_ids))

    def use(self, groups: Groups) -> None:
        """Use ``groups`` for the collectives and the checkpoints of this trainer."""
        self.topology_record = asdict(self.topology)
        self.collectives = Collectives(groups.vote)
        self.checkpoints = self.open_checkpoints(groups)
        failpoints.watch(self._tell_phase)

    def break_with(self, hang_up: Abort) -> None:
        """Set the function that shuts down the connections to other ranks. If this rank can survive the loss of other
        ranks, the control plane also calls the function when a rank is lost."""
        self.hang_up = hang_up
        if self.context.worker.can_survive:
            self.context.worker.on_break(hang_up)

    def run(self) -> None:
        """Train to the last iteration, or until a vote contains a request to stop. Then set ``ended``. With
        ``training.evaluate_only``, only evaluate.

        If a vote contains a request to change the nodes, finish the iteration and its work that is due, and return.

        Raises:
            TrainingStopped: a policy stopped the run at an iteration. The state before this iteration is saved.
        """
        training = self.config.training
        if training.evaluate_only:
            self._evaluate(self.engine.iteration, due=True)
            self.ended = self.is_complete = True
            return
        last = min(training.train_iterations, training.exit_at_iteration or training.train_iterations)
        # Evaluations and saves are collective. If one rank has not finished them, all ranks repeat them.
        if self.collectives.any(self.rounded_off < self.engine.iteration):
            self.round_off(self.engine.iteration)
        while self.engine.iteration < last and not self._stop_is_voted():
            if self.membership_ends():
                return
            self.iterate(self.engine.iteration + 1)
        self.profiler.stop()
        if self.config.checkpoint.save_at_end:
            self.save()
        self._digest(due=training.digest_interval_iterations > 0)
        self.checkpoints.finish()
        if self.snapshots is not None:
            self.snapshots.finish()
        self.ended = True
        self.is_complete = self.engine.iteration >= training.train_iterations

    def _stop_is_voted(self) -> bool:
        return self.engine.newest_vote is not None and self.engine.newest_vote.stop_requested

    def _wants_stop(self) -> bool:
        # At the end of an exit interval, request a stop in the ballot. A later job that resumes drops this vote, and so
        # continues to train.
        interval, in_progress = self.config.training.exit_interval_iterations, self.engine.in_progress
        is_end = interval is not None and in_progress is not None and in_progress.iteration % interval == 0
        return is_end or self.context.worker.stop_requested()

    def membership_ends(self) -> bool:
        """Return whether the newest vote requests that nodes join or leave before the next iteration."""
        vote = self.engine.newest_vote
        # A request in a vote of an earlier membership does not count: it has led to this membership.
        return vote is not None and vote.change_requested and vote.generation == self.context.generation

    def teardown(self, *, keeps_engine: bool = False) -> None:
        """Release all objects that use the process groups; with ``keeps_engine``, all except the engine. This works
        even if other ranks are lost."""
        self.profiler.stop()
        # Snapshots and saves end first, because their copies still read tensors that the engine is about to free.
        if self.snapshots is not None:
            self.snapshots.close()
            self.snapshots = None
        checkpoints: CheckpointManager | None = self.__dict__.pop("checkpoints", None)
        abandoned = None if checkpoints is None else checkpoints.abandon()
        if keeps_engine:
            failpoints.hit("teardown", self.engine.iteration)
        else:
            self.engine.teardown()
        failpoints.watch(None)
        if abandoned is not None:
            self.abandoned_saves.append(abandoned)
            self.is_save_due = True
        self.__dict__.pop("collectives", None)

    def _tell_phase(self, iteration: int, phase: str) -> None:
        if iteration > 0 or phase == "build":  # the forward passes of an evaluation have iteration 0
            self.context.worker.progress(iteration, phase)

    # -- one iteration ------------------------------------------------------------------------------------

    def iterate(self, iteration: int) -> None:
        """Run iteration ``iteration``, and the work that is due before and after it."""
        self._rebalance(iteration)
        self.profiler.begin(iteration, rank=self.context.rank, generation=self.context.generation)
        began = time.perf_counter()
        result = self.engine.run_iteration(iteration)
        if result.decision.action != "stop":
            # No recovery can return to the state before this iteration any more, so free the stored earlier state.
            if self.previous_placement is not None:
                self.placed_from = iteration
            self.previous_placement = self.membership_start = None
        self.observe(result)
        seconds = time.perf_counter() - began
        self.account(result, seconds)
        if self.snapshots is not None:
            self.snapshots.after_iteration(iteration, result.vote, seconds)
            keep_log(self.engine, self.snapshots, self.report)
        self.round_off(iteration)
        self.profiler.end(iteration)
        if self.snapshots is not None and result.vote.stop_requested:
            self.snapshots.persist_newest()

    def round_off(self, iteration: int) -> None:
        """Evaluate, save a checkpoint and report state digests, if they are due after ``iteration``."""
        self._evaluate(iteration, due=_due(iteration, self.config.training.eval_interval_iterations))
        self.checkpoints.poll()
        if _due(iteration, self.config.checkpoint.save_interval_iterations):
            self.save()
        self._digest(due=_due(iteration, self.config.training.digest_interval_iterations))
        # Set last: after a failure in this method, all of the work is repeated after the recovery.
        self.rounded_off = iteration

    def account(self, result: IterationResult, seconds: float, batch: BatchPlan | None = None) -> None:
        """Report an iteration that took ``seconds``. If its vote decided to stop, stop the run. ``batch`` is the batch
        plan of the iteration; None stands for the engine's current plan."""
        iteration, vote, decision = result.vote.iteration, result.vote, result.decision
        if _due(iteration, self.config.telemetry.log_interval_iterations):
            plan = (batch or self.engine.batch).at(iteration)
            for record in iteration_records(self.config, result, plan, seconds, self.nodes, self.throughput):
                self.report(record)
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
        """Save a checkpoint and end the run because of ``reason``.

        Raises:
            TrainingStopped: always.
        """
        self.save()
        self.checkpoints.finish()
        raise TrainingStopped(f"iteration {iteration}: {reason}")

    def _observers(self) -> list[PlacementManager | Snapshotter]:
        snapshots = self.snapshots if self.snapshots is not None and self.snapshots.needs_loads else None
        return [observer for observer in (self.placement, snapshots) if observer is not None]

    def _reports_load(self, iteration: int) -> bool:
        return _due(iteration, self.config.telemetry.expert_load_interval_iterations)

    def _wants_load(self, iteration: int) -> bool:
        # The result must be the same on every rank, because summing the loads is collective.
        return bool(self.config.model.num_moe_experts) and (self._reports_load(iteration) or bool(self._observers()))

    def observe(self, result: IterationResult) -> None:
        """Pass the number of tokens of each expert to the planners of placements and of windows, if these use it."""
        if result.expert_load is not None:
            for observer in self._observers():
                observer.observe(result.expert_load)

    def _rebalance(self, iteration: int) -> None:
        change = None if self.placement is None else self.placement.change_before(iteration)
        if self.placement is None or change is None or iteration == 1:
            return
        self.context.worker.progress(iteration, "migrate")
        began = time.perf_counter()
        # The plan of a window names the experts of each rank, which ``move`` changes.
        if self.snapshots is not None:
            self.snapshots.pause()
        self.checkpoints.settle()
        self.move(change, iteration)
        # Adopt plans only after ``move``, which records the old plans: if the migration fails, ranks return to these.
        self.placement.adopt(change)
        self.keep_copies()
        self.report_placement(change.reason, change=change, seconds=time.perf_counter() - began)

    def move(self, change: Change, iteration: int, *, is_evacuation: bool = False) -> None:
        """Move experts between ranks before ``iteration``, according to ``change``. All ranks must call this. This rank
        can return to the old placement until an iteration with the new placement is committed."""
        assert self.placement is not None, "the job has no expert placement"
        self.checkpoints.forget_plan()
        failpoints.hit("migrate", iteration)
        plans = self.placement.plans
        former = partial(
            PreviousPlacement,
            before_iteration=iteration,
            plans=plans,
            is_evacuation=is_evacuation,
            copies=self.engine.state_copies,
        )
        migration = self.placement.part_of(change)
        replicas = self.placement.replicas(migration.placement)
        # An evacuation is not done in place: a recovery before the next commit may need the old or the new placement.
        steps = None if is_evacuation else self.placement.steps_to(change)
        if steps is not None:
            # With a kept layout, a rank may have to return to its own former experts, so it keeps copies of them.
            saved: SavedExperts | None = {} if self.config.recovery.keep_layout else None
            self.previous_placement = former(state={}, is_in_place=True, saved=saved)
            self.engine.replace_experts(steps, replicas, saved=saved)
            return

        def keep(state: NamedState) -> None:
            self.previous_placement = former(state=state, host=self.engine.train_state())

        # During the migration, this rank keeps its whole former state. Afterwards, it keeps the experts that have left.
        self.previous_placement = former(state=self.engine.migrate(replicas, migration, keep=keep))

    def keep_copies(self, *, former: StateCopies | None = None) -> None:
        """Copy optimizer state to other ranks if ``placement.state_copies`` is set. ``former`` has earlier copies,
        which must be up to date; None without any. These copies are kept if the plan has not changed."""
        placement, stage = self.placement, self.topology.coordinates(self.context.rank).pp
        plan = plan_shard_copies(self.config, stage) if placement is None else placement.copy_plan()
        if plan is None:
            return
        self.engine.keep_copies(plan, None if placement is None else placement.replicas().plan, former=former)
        # Free the old copies only now: until all new copies exist, a loss of ranks may leave only the old ones.
        if self.previous_placement is not None:
            self.previous_placement = replace(self.previous_placement, copies=None)

    def report_placement(self, reason: str, *, change: Change | None = None, seconds: float = 0.0) -> None:
        """Report the placement that applies from the next iteration on, and write it to a file."""
        assert self.placement is not None, "the job has no expert placement"
        iteration, error = self.engine.iteration + 1, None
        if self.context.rank == 0:
            try:
                self.placement.write(self.context.run_dir / "placements" / f"iter_{iteration:07d}.json")
            except OSError as failure:
                # Training continues without the file, because checkpoints and windows contain the placement, too.
                error = f"{type(failure).__name__}: {failure}"
        record = placement_record(iteration, self.placement, reason, change, seconds)
        self.report(replace(record, file_error=error))

    def _placement_manager(self) -> PlacementManager | None:
        if self.config.placement.algorithm is None:
            return None
        return PlacementManager(self.config, stage=self.topology.coordinates(self.context.rank).pp)

    @property
    def topology(self) -> Topology:
        """Coordinates of this membership's ranks in the parallel layout."""
        return Topology.of(self.config.parallel, self.context.world_size)

    def _evaluate(self, iteration: int, *, due: bool) -> None:
        if not due:
            return
        self.context.worker.progress(iteration, "evaluation")
        self.report(evaluation_record(self.engine))

    def _digest(self, *, due: bool) -> None:
        if due:
            mine = state_digest(self.engine.model_chunks, self.engine.optimizer)
            digests = tuple(self.collectives.gather(mine))
            self.report(StateDigest(iteration=self.engine.iteration, digests=digests))

    # -- checkpoints --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save a checkpoint of the current state, unless it is saved already."""
        iteration = self.engine.iteration
        # If a save of this state is in progress, wait for it, and save again only if it has failed.
        if self.checkpoints.pending_iteration == iteration:
            self.checkpoints.finish()
        if iteration == 0 or self.checkpoints.last_saved_iteration == iteration:
            return
        self.context.worker.progress(iteration, "checkpoint")
        failpoints.hit("checkpoint", iteration)
        self.checkpoints.save(self.state(self.extra_state()), iteration)

    def state(self, extra: dict[str, Any]) -> DenseState:
        """Return all training state of this rank and ``extra`` as one object: a save reads it, and a load fills it."""
        engine = self.engine
        return DenseState(
            model_chunks=engine.model_chunks,
            optimizer=engine.optimizer,
            scheduler=engine.scheduler,
            host=engine.train_state(),
            consumed_samples=engine.batch.samples_before(engine.iteration + 1),
            extra=extra,
            before_update=engine.before_update,
        )

    def open_checkpoints(self, groups: Groups) -> CheckpointManager:
        """Create the ``CheckpointManager`` of this rank for the process groups ``groups``."""
        return CheckpointManager(
            self.config.checkpoint,
            run_dir=self.context.run_dir,
            identity=self.identity,
            topology_record=self.topology_record,
            group=groups.vote,
            dp_cp_group=groups.pg_collection.dp_cp,
            report=self.report_record,
            generation=groups.generation,
        )

    def extra_state(self) -> dict[str, Any]:
        """Return the data fingerprint and the placement, for checkpoints. They are the same on all ranks."""
        extra: dict[str, Any] = {"data_fingerprint": self.samples["train"].fingerprint()}
        if self.placement is not None:
            extra["placement"] = self.placement.to_json()
        return extra

    def load(self, directory: Path) -> None:
        """Load the checkpoint in ``directory`` into the engine.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not match this job.
            DataError: the checkpoint was trained on other data. Only a checkpoint without a manifest, or with
                ``format_version`` 1, is compared here. The data of all other checkpoints were compared before.
        """
        state = self.state({})
        manifest = self.checkpoints.load(state, directory).manifest
        if manifest is None or manifest.format_version == 1:
            check_known_data(self.config, self.samples["train"], state.extra.get("data_fingerprint"), directory)
        self.engine.restore(state.host)

    # -- snapshots ----------------------------------------------------------------------------------------

    def _open_snapshot_client(self) -> KeeperClient | None:
        if self.config.snapshot.policy is None:
            return None
        return open_client(
            self.config,
            self.context,
            self.nodes,
            assignment=self._peer_assignment(),
            topology=self.topology_record,
            run_id=self.identity.run_id,
        )

    def _peer_assignment(self) -> PeerAssignment:
        # Assigns to each node the nodes in other failure domains that store copies of its windows. The present nodes
        # are numbered from 0. Ranks with equal state capture disjoint parts of it, so without peers a window has no
        # copies.
        return PeerAssignment.of(self.config.member_domains, self.config.snapshot.num_peer_copies)

    def open_restorer(self, client: KeeperClient | None, *, region: Collectives | None = None) -> SnapshotRestorer:
        """Create the ``SnapshotRestorer`` of this rank.

        Args:
            client: this rank's connection to the snapshot server; None to read persisted windows only.
            region: collectives of the pipeline stages that replay a window from memory while the other stages wait;
                None if the whole job restores.
        """
        context = self.context
        return SnapshotRestorer(
            rank=context.rank,
            node=context.node,
            run_dir=context.run_dir,
            identity=self.identity,
            topology=self.topology_record,
            settings=self.replay_config(),
            collectives=self.collectives if region is None else region,
            client=client,
            folder=WindowFolder.of_run(self.config, context.run_dir) if region is None else None,
            report=self.report_own if region is None else self._report_problem,
        )

    def _report_problem(self, record: Record) -> None:
        # Other records are dropped, because the recovery that replays these stages is reported as a whole.
        if isinstance(record, SnapshotProblem):
            self.report_own(record)

    def _continue_snapshots(self, client: KeeperClient, window: LocalWindow | None) -> None:
        snapshots = self.take_snapshots(client, None if window is None else (window.stored, window.plan_in_force))
        # A part of the window that was fetched from a peer has no other copy, so the loss of this peer would end the
        # run. To end this risk soon, capture the whole state at once, instead of in the slices of a planned window.
        if window is not None and self.collectives.any(window.stored.where == "copy"):
            snapshots.capture_whole_next()

    def take_snapshots(self, client: KeeperClient, resumed: tuple[StoredWindow, WindowPlan] | None) -> Snapshotter:
        """Create the ``Snapshotter`` of this rank, which captures windows from now on.

        Args:
            resumed: the window to keep until a newer one is committed, and the plan of the next windows; None without
                a window.
        """
        snapshots = Snapshotter(
            self.config,
            self.engine,
            client=client,
            assignment=self._peer_assignment(),
            node=self.context.node,
            header=partial(self._slice_header, self.replay_config()),
            report=self.report_own,
        )
        if resumed is not None:
            snapshots.resume(*resumed)
        self.snapshots = snapshots
        return snapshots

    def _slice_header(self, settings: dict[str, Any], index: int) -> Header:
        # A replay begins with slice 0, so only the header of slice 0 contains the state besides tensors.
        if index > 0:
            return dict
        placement = None if self.placement is None else self.placement.to_json()
        return first_header(self.engine.train_state(), placement, settings, self.identity.settings)

    # -- reports ------------------------------------------------------------------------------------------

    def report(self, record: Record) -> None:
        """Report an event once for the job, from ``reporting_rank``: rank 0 or, while a recovery reports the end of the
        previous membership, the first rank that has state."""
        self.report_record(record.to_record())

    def report_own(self, record: Record) -> None:
        """Report a ``SnapshotProblem`` (it concerns one node) from this rank. Pass other events to ``report``."""
        if isinstance(record, SnapshotProblem):
            self.context.worker.report(record.to_record())
        else:
            self.report(record)

    def _report_here(self, record: Record) -> None:
        self.context.worker.report(record.to_record())

    def report_record(self, record: dict[str, Any]) -> None:
        """Report an event in its JSON form, once for the job."""
        if self.context.rank == self.reporting_rank:
            self.context.worker.report(record)


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0

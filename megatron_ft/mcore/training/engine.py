"""Model and optimizer of one rank, and the steps of an iteration before and after the commit vote."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.data.batches import (
    BatchReader,
    DocumentRules,
    Microbatch,
    SampleSource,
    forward_step,
    plan_batches,
)
from megatron_ft.mcore.groups import Groups, exchange
from megatron_ft.mcore.model.build import build_model, forget_iteration, forget_shards, release_caches
from megatron_ft.mcore.model.fp8_layers import DelayedScaling
from megatron_ft.mcore.model.transformer_config import build_transformer_config, moe_layer_pattern
from megatron_ft.mcore.moe.replica_layer import MixtureLayer, ReplicaGradients, ReplicaMixtureLayer, Replicas
from megatron_ft.mcore.moe.router import forget_auxiliary_losses, routed_tokens, router_builder, take_auxiliary_losses
from megatron_ft.mcore.optimizer import adamw
from megatron_ft.mcore.optimizer.adamw import build_optimizer, build_scheduler, set_position
from megatron_ft.mcore.optimizer.state_copies import StateCopies
from megatron_ft.mcore.pipeline.communicator import Boundaries
from megatron_ft.mcore.state.tensors import (
    ExpertPlaces,
    NamedState,
    SavedExperts,
    expert_of,
    move_experts,
    put_state,
    take_state,
)
from megatron_ft.mcore.state.train_state import IterationResult, IterationState, TrainState, generators_digest, seed_rng
from megatron_ft.mcore.training.reporting import StragglerTimer, memory_use
from megatron_ft.planning.iteration import Ballot, CommitPolicy, Decision, History, RankFigures, Vote, WindowReport
from megatron_ft.planning.placement.copies import StateCopyPlan
from megatron_ft.planning.placement.migration import MigrationPlan, Replacement, Step
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.snapshot.partial_experts import counted_layers

_BUILT = ("model_chunks", "optimizer", "scheduler", "p2p", "transformer_config", "_mixture_layers", "_delayed_scaling")
_OPTIONAL = ("replica_gradients",)


class TrainingEngine:
    """Model, optimizer and data of one rank.

    Args:
        config: configuration of the job.
        device: device of this rank.
        transformer_impl: ``local`` or ``transformer_engine``.
        vocab_size: size of the vocabulary after padding.
        samples: token sequences of the splits ``train`` and ``valid``.
        stop_requested: returns whether this rank has received a request to end the run, for the ballot.
        change_requested: returns whether nodes are to join or leave, for the ballot.
        wants_load: returns, for an iteration, whether the ranks must sum the tokens per expert before the vote.
    """

    model_chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    state_copies: StateCopies | None = None
    """Copies of optimizer state, on this rank and on others. None before ``keep_copies`` and while experts move."""

    def __init__(
        self,
        config: JobConfig,
        *,
        device: torch.device,
        transformer_impl: str,
        vocab_size: int,
        samples: Mapping[str, SampleSource],
        stop_requested: Callable[[], bool] = lambda: False,
        change_requested: Callable[[], bool] = lambda: False,
        wants_load: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.config = config
        self.device = device
        self.transformer_impl = transformer_impl
        self.vocab_size = vocab_size
        self.samples = samples
        self.stop_requested = stop_requested
        self.change_requested = change_requested
        self.iteration = 0
        self.history = History()
        self.newest_vote: Vote | None = None
        """Vote of the newest iteration; None before the first iteration of this process."""
        self.in_progress: IterationState | None = None
        """The iteration that has begun and is not finished, or the iteration that stopped the run."""
        self.wants_load = wants_load
        self.before_update: list[Callable[[], None]] = []
        """Functions that are called before master weights, moments and compute weights change."""
        self.window_report: Callable[[], WindowReport] = WindowReport
        """Function that returns the state of this rank's windows, which is a part of the rank's ballot (its vote)."""
        self.boundaries = Boundaries()
        self.num_forward_passes = 0  # one pass: one microbatch through one chunk
        self._router = router_builder(config)
        self._counted_layers = counted_layers(config)
        self._repays = config.snapshot.repay_capacity_share is not None
        self._straggler_timer = StragglerTimer.on(device)
        self.policy = CommitPolicy.of(config)

    # -- life ---------------------------------------------------------------------------------------------

    def use(self, config: JobConfig) -> None:
        """Replace the configuration by ``config``, which is for other nodes. The next build of the engine uses it."""
        self.config = config

    def build(
        self,
        groups: Groups,
        replicas: Replicas | None = None,
        *,
        group_keys: adamw.GroupKeys | None = None,
        is_offline: bool = False,
        state: NamedState | None = None,
    ) -> None:
        """Build model and optimizer on the process groups ``groups``, with initial weights.

        Args:
            replicas: experts of the ranks of this stage; None if Megatron assigns experts to ranks.
            group_keys: keys of the parameter groups, from another rank, if not all ranks build now; otherwise None.
            is_offline: whether ``groups`` are not connected, so that this rank cannot exchange ``group_keys``.
            state: tensors that the optimizer uses instead of its own, see ``adamw.adopt_state``.
        """
        failpoints.hit("prebuild" if is_offline else "build", self.iteration)
        self.groups = groups
        self.pg = groups.pg_collection
        seed_rng(self.config.training.seed, self.pg)
        self._assemble(replicas, group_keys, is_offline=is_offline, state=state)
        self.first_generators = generators_digest()  # shows later whether random numbers have been drawn

    def use_built(self, groups: Groups, group_keys: adamw.GroupKeys, *, has_moved: bool) -> bool:
        """Use ``groups`` in an engine that was built offline, now that they are connected.

        Args:
            group_keys: keys of the parameter groups, from another rank's engine.
            has_moved: whether ``Groups.move`` has changed ``groups`` to those of another rank since the build.

        Returns:
            Whether the optimizer was built again. This is necessary if ``groups`` have moved, because the other rank
            has other shards, or if other stages have parameter groups that this stage lacks.
        """
        is_other = has_moved or [set(keys) for keys in self.group_keys] != [set(keys) for keys in group_keys]
        if is_other:
            self.groups, self.pg = groups, groups.pg_collection
            self.first_generators = generators_digest()  # a move has seeded the generators again
            forget_shards(self.model_chunks)
            self._equip(group_keys)
        self.group_keys = group_keys
        self.reconnect(groups)
        return is_other

    def reconnect(self, groups: Groups) -> None:
        """Use ``groups``: the groups of ``build`` with new connections. Keep model, gradient buffers and optimizer. The
        caller must have finished or rolled back the iteration in progress."""
        self.groups, self.pg = groups, groups.pg_collection
        forget_iteration(self.model_chunks)
        self._straggler_timer.forget()
        forget_auxiliary_losses()

    @property
    def is_built(self) -> bool:
        """Whether model, optimizer and scheduler exist."""
        # The scheduler is built last, so model and optimizer are complete if it exists.
        return "scheduler" in self.__dict__

    def migrate(
        self,
        replicas: Replicas,
        migration: MigrationPlan,
        *,
        keep: Callable[[NamedState], None] | None = None,
    ) -> NamedState:
        """Carry out ``migration``, and rebuild the engine for ``replicas``. All ranks of the stage must call this.

        Args:
            keep: called with all tensors of this rank before the migration, to restore them after a failure.

        Returns:
            The tensors of the experts that this rank no longer has.
        """
        state = take_state(self.model_chunks, self.optimizer)
        if keep is not None:
            keep(dict(state))  # a copy, because ``move_experts`` adds tensors
        move_experts(state, migration.transfers, self.pg.ep, migration.placement.ranks)
        # The engine has no usable state until ``put_state`` returns. After a failure, the caller uses the tensors that
        # ``keep`` received.
        self.rebuild(replicas)
        put_state(self.model_chunks, self.optimizer, state)
        held = migration.placement.of_rank(self.pg.ep.rank())
        return {name: t for name, t in state.items() if (expert := expert_of(name)) is not None and expert not in held}

    def replace_experts(self, steps: Iterable[Step], replicas: Replicas, *, saved: SavedExperts | None = None) -> int:
        """Replace experts in place, as in ``steps``. Then this rank has the experts that ``replicas`` assigns to it.

        All ranks of the stage must call this. Even after a failure, each rank has the complete state of the experts
        that its model names, and every expert is complete on at least one rank.

        Args:
            saved: receives copies of the experts that this rank drops, for ``return_experts``; None makes no copies.

        Returns:
            Number of bytes that this rank received.
        """

        def announced() -> Iterator[Step]:
            for step in steps:
                failpoints.hit("migrate_step", self.iteration + 1)
                yield step

        def rename(replacement: Replacement) -> None:
            self._replica_layers[replacement.transfer.layer_number].replace(
                replacement.dropped, replacement.transfer.expert
            )

        places = ExpertPlaces(self.model_chunks, self.optimizer)
        num_bytes = places.carry_out(announced(), replicas.plan.ranks, self.pg.ep, rename, saved)
        self._settle(places, replicas)
        return num_bytes

    def return_experts(self, replicas: Replicas, saved: SavedExperts) -> None:
        """Undo ``replace_experts``, even if it failed: give this rank its former experts again, without communication.
        ``replicas`` is the former assignment. ``saved`` contains the copies that ``replace_experts`` made."""
        places, wanted = ExpertPlaces(self.model_chunks, self.optimizer), replicas.plan.of_rank(self.pg.ep.rank())
        for number, layer in self._replica_layers.items():
            before = {expert for of_layer, expert in wanted if of_layer == number}
            here = set(layer.local_expert_indices)
            for dropped, expert in zip(sorted(here - before), sorted(before - here), strict=True):
                places.put(number, dropped, expert, saved[number, expert])
                layer.replace(dropped, expert)
        self._settle(places, replicas)

    @property
    def _replica_layers(self) -> dict[int, ReplicaMixtureLayer]:
        return {m.layer_number: m for m in self._mixture_layers if isinstance(m, ReplicaMixtureLayer)}

    def _settle(self, places: ExpertPlaces, replicas: Replicas) -> None:
        for number, layer in self._replica_layers.items():
            # Sort experts as in a newly built model, because sums over parameters depend on the order.
            places.sort(number, layer.local_expert_indices)
            layer.use(replicas.slots_of(number))
        adamw.follow_parameters(self.optimizer, self.model_chunks, self.pg)
        self.end_copies()
        self.replica_gradients = ReplicaGradients(self.model_chunks, replicas, self.pg.ep)

    def rebuild(self, replicas: Replicas | None) -> None:
        """Build model and optimizer again on the same groups. The caller must then restore weights and moments."""
        state = self.train_state()
        self._release()
        failpoints.hit("migrate_build", self.iteration + 1)
        self._assemble(replicas)
        self.restore(state)
        set_position(self.scheduler, self.batch.samples_before(self.iteration + 1))

    def _assemble(self, replicas: Replicas | None, group_keys: adamw.GroupKeys | None = None, **options: Any) -> None:
        pg = self.pg
        self.transformer_config = build_transformer_config(self.config, self.transformer_impl)
        self.model_chunks = build_model(
            self.config,
            self.transformer_config,
            vocab_size=self.vocab_size,
            device=self.device,
            pg_collection=pg,
            replicas=replicas,
            router=self._router,
        )
        self.replica_gradients = None if replicas is None else ReplicaGradients(self.model_chunks, replicas, pg.ep)
        self._equip(group_keys, **options)

    def _equip(self, group_keys: adamw.GroupKeys | None, **options: Any) -> None:
        pg = self.pg
        self.optimizer, self.group_keys = build_optimizer(self.config, self.model_chunks, pg, group_keys, **options)
        self.scheduler = build_scheduler(self.config, self.optimizer)
        self._connect_schedule()
        self.batch = plan_batches(self.config.training, pg.dp.size(), pg.pp.size() if len(self.model_chunks) > 1 else 1)
        self._mixture_layers = [m for c in self.model_chunks for m in c.modules() if isinstance(m, MixtureLayer)]
        self._delayed_scaling = DelayedScaling(self.model_chunks)
        self._straggler_timer.watch(self.model_chunks)

    def keep_copies(
        self, plan: StateCopyPlan, placement: PlacementPlan | None, *, former: StateCopies | None = None
    ) -> StateCopies:
        """Copy optimizer state to the ranks that ``plan`` names. Each iteration updates the copies. If ``former`` has
        an equal plan, its copies are kept. ``placement`` is None without replica slots. All ranks must call this."""
        chunks, ranks = self.model_chunks, self.pg.tp_dp_cp
        self.state_copies = StateCopies(
            chunks, self.optimizer, self.config.optimizer, plan=plan, placement=placement, group=ranks, former=former
        )
        return self.state_copies

    def teardown(self) -> None:
        """Release all objects that use the process groups, so that the caller can destroy the groups."""
        failpoints.hit("teardown", self.iteration)
        self._release("pg", "groups")

    def end_copies(self) -> None:
        """Drop the copies of optimizer state: ``state_copies`` is None until ``keep_copies`` is called again."""
        if self.state_copies is not None:
            self.state_copies.end()
        self.state_copies = None

    def _release(self, *others: str) -> None:
        self.end_copies()
        forget_auxiliary_losses()
        release_caches()
        self.boundaries.release()
        for name in (*_BUILT, *_OPTIONAL, *others):
            self.__dict__.pop(name, None)  # after a failed build, some attributes do not exist
        # Modules, hooks and groups are in reference cycles, which only a garbage collection frees.
        gc.collect()

    def _connect_schedule(self) -> None:
        config, chunks = self.transformer_config, self.model_chunks
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = self._finalize_gradients
        no_sync: Any = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        if self.config.parallel.overlap_grad_reduce and len(chunks) > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]  # type: ignore[misc]
        self.p2p = self.boundaries.connect(self.pg.pp, config)
        self.forward_backward = get_forward_backward_func(
            self.pg.pp.size(), self.config.parallel.virtual_pipeline_model_parallel_size
        )

    # -- one iteration ------------------------------------------------------------------------------------

    def run_iteration(self, iteration: int) -> IterationResult:
        """Run iteration ``iteration`` (counted from 1), vote, and carry out the decision."""
        # All changes before the vote can be undone with ``IterationState.before``.
        vote = self.vote(self.prepare(iteration))
        result = self.decide(vote)
        self.apply(result)
        if result.decision.action == "commit":
            self.gather()
        if result.decision.action != "stop":
            self.finish(vote, result.decision)
        return result

    def decide(self, vote: Vote) -> IterationResult:
        """Decide from ``vote`` whether the iteration in progress is committed, is skipped, or stops the run."""
        about = self._of(vote.iteration)
        return IterationResult(
            vote=vote,
            decision=self.policy.decide(vote, self.history),
            learning_rate=float(max(group["lr"] for group in self.optimizer.param_groups)),
            median_loss=self.history.median_loss,
            expert_load=about.expert_load,
            of_ranks=about.of_ranks,
        )

    def apply(self, result: IterationResult) -> None:
        """Apply the decision to this rank's state: commit, skip or roll back the iteration in progress."""
        in_progress = self._of(result.vote.iteration)
        if result.decision.action == "commit":
            self.commit(result.vote)
        elif result.decision.action == "skip":
            # A skip restores only the router bias. It keeps the new states of random number generators and loss scale.
            in_progress.before.restore_router_bias(self.model_chunks)
        else:
            # The run stops. The state before the iteration is restored, so that it can be saved as a checkpoint.
            self._roll_back(in_progress)

    def _of(self, iteration: int) -> IterationState:
        in_progress = self.in_progress
        assert in_progress is not None and in_progress.iteration == iteration, f"iteration {iteration} has not begun"
        return in_progress

    def finish(self, vote: Vote, decision: Decision) -> None:
        """Record the iteration of ``vote`` as the newest, after its ``decision`` was carried out."""
        counted = self.in_progress.counts_of(self._counted_layers) if self.in_progress else (None, None)
        self.history = self.history.after(vote, decision, self.config.training.loss_spike_window, *counted)
        self.continue_after(vote.iteration, vote)
        # Only now a replay may read the logged messages: an attempt that failed may have logged only some of them.
        self.boundaries.commit(vote)

    def prepare(self, iteration: int) -> Ballot:
        """Compute gradients and their norm for ``iteration``. Return this rank's ballot (entry in the vote)."""
        # Capture the state first, because Megatron updates the router bias and the loss scale before the vote.
        self.in_progress = in_progress = IterationState(iteration=iteration, before=self.train_state())
        reports = self.accumulate(iteration)
        # Sum loads before the vote. If ranks are lost after the vote, survivors finish the iteration. They must plan
        # placements from the same loads, but can no longer sum loads with the lost ranks.
        if self._counted_layers or self.wants_load(iteration):
            in_progress.expert_load, *repaid = self._expert_tokens()
            in_progress.repaid = repaid[0] if repaid else None
        # Read the loss scale before ``adamw.prepare`` updates it: the ballot needs the scale of these gradients.
        loss_scale = float(self.optimizer.get_loss_scale())
        found_inf, grad_norm = adamw.prepare(self.optimizer)
        # Send gradients before the vote: only the owner of a shard has its reduced gradients, and may be lost later.
        if self.state_copies is not None:
            self.state_copies.exchange_gradients()
        return self.ballot(reports, loss_scale=loss_scale, found_inf=found_inf, grad_norm=grad_norm)

    def accumulate(self, iteration: int) -> list[torch.Tensor]:
        """Run forward, backward and gradient reduction of all microbatches of ``iteration``.

        Returns:
            On the last stage, a float64 [2] per microbatch: loss sum and number of tokens. Empty on other stages.
        """
        failpoints.hit("data", iteration)
        # The learning rate follows from the iteration, so it is equal on ranks that rolled back, replayed or joined.
        set_position(self.scheduler, self.batch.samples_before(iteration))
        self._start_iteration(iteration)
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        with self.boundaries.logging(iteration, self.groups.generation):
            return self._run_microbatches("train", iteration, forward_only=False)

    def ballot(self, reports: list[torch.Tensor], *, loss_scale: float, found_inf: bool, grad_norm: float) -> Ballot:
        """Make this rank's ballot (entry in the vote) for the iteration that ``accumulate`` has run. Reset Megatron's
        auxiliary losses. ``reports`` is the result of ``accumulate``."""
        loss_sum, num_tokens = self._own_share(reports)
        aux_loss_sum, z_loss_sum = take_auxiliary_losses()
        return Ballot(
            generation=self.groups.generation,
            iteration=self._current_iteration,
            found_inf=int(found_inf),
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            aux_loss_sum=aux_loss_sum,
            z_loss_sum=z_loss_sum,
            stop_requested=int(self.stop_requested()),
            change_requested=int(self.change_requested()),
            pass_seconds=self._straggler_timer.end_iteration(),
            idle_seconds=self.boundaries.idle.idle_seconds,
            **memory_use(self.device),
            **asdict(self.window_report()),
        )

    def vote(self, ballot: Ballot) -> Vote:
        """Exchange the ballots of all ranks, and return the vote that combines them."""
        iteration = ballot.iteration
        failpoints.hit("vote_before", iteration)
        in_progress = self._of(iteration)
        # Set this before the exchange. Once this rank has sent its ballot, other ranks may have the complete vote and
        # commit. Then this rank must be able to finish the iteration, even if its own exchange fails.
        in_progress.contribute()
        ballots = exchange(ballot, self.groups.vote)
        in_progress.of_ranks = RankFigures.of(ballots)
        in_progress.vote = self.tally(ballots)
        failpoints.hit("vote_after", iteration)
        return in_progress.vote

    def tally(self, ballots: Sequence[Ballot]) -> Vote:
        """Combine the ballots of all ranks, in rank order, to a vote."""
        num_moe_losses = self.batch.at(ballots[0].iteration).num_real_microbatches * sum(
            moe_layer_pattern(self.config.model)
        )
        return Vote.of(
            ballots,
            clip_grad=self.config.optimizer.clip_grad,
            num_moe_losses=num_moe_losses if self.config.model.num_moe_experts else 0,
        )

    def commit(self, vote: Vote) -> None:
        """Update master weights, moments and compute weights of this rank, and its copies of optimizer state, with the
        gradient norm of ``vote``."""
        failpoints.hit("update", vote.iteration)
        # A snapshot or a save in progress may still be copying the tensors that are about to change.
        for wait in tuple(self.before_update):
            wait()
        # ``in_progress`` is None in a replay. A replay that fails starts again from its window, and needs no record.
        with nullcontext() if self.in_progress is None else self.in_progress.updating():
            adamw.update(self.optimizer, self.config.optimizer.clip_grad, vote.grad_norm)
            self._delayed_scaling.advance()
            if self.state_copies is not None:
                rate = float(max(group["lr"] for group in self.optimizer.param_groups))
                self.state_copies.update(vote.grad_norm, rate)

    def gather(self) -> None:
        """All-gather the updated compute weights."""
        failpoints.hit("gather", self._current_iteration)
        adamw.gather(self.optimizer, self.model_chunks)

    def train_state(self) -> TrainState:
        """Copy the state of this rank after the newest iteration, except parameters and optimizer state."""
        return TrainState.capture(self.model_chunks, self.optimizer, iteration=self.iteration, history=self.history)

    def continue_after(self, iteration: int, vote: Vote | None) -> None:
        """Record ``iteration`` and its ``vote`` as the newest. The caller provides the state after ``iteration``."""
        self.iteration, self.newest_vote, self.in_progress = iteration, vote, None

    def restore(self, state: TrainState) -> None:
        """Restore ``state`` (see ``train_state``). Raise RecoveryError if it belongs to another model or optimizer."""
        state.restore(self.model_chunks, self.optimizer)
        self.iteration, self.history = state.iteration, state.history

    def abort(self) -> None:
        """Roll back the iteration in progress, if there is one, without committing it."""
        if self.in_progress is not None:
            self._roll_back(self.in_progress)
        self.in_progress = None

    def _roll_back(self, in_progress: IterationState) -> None:
        # No weight has changed. Gradients need no rollback, because the next iteration zeroes their buffers.
        self.restore(in_progress.before)
        set_position(self.scheduler, self.batch.samples_before(self.iteration + 1))

    # -- reading ------------------------------------------------------------------------------------------

    def evaluate(self) -> tuple[float, int]:
        """Return (mean loss per token, number of tokens) of ``training.eval_iterations`` validation batches."""
        for chunk in self.model_chunks:
            chunk.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch in range(1, self.config.training.eval_iterations + 1):
                # Reset counters: forced routing counts microbatches, whose number per batch depends on the layout.
                self._start_iteration(0)
                reports = self._run_microbatches("valid", batch, forward_only=True)
                totals += torch.tensor(self._own_share(reports), dtype=torch.float64)
        for chunk in self.model_chunks:
            chunk.train()
        dist.all_reduce(totals, group=self.groups.vote)
        return float(totals[0] / totals[1]), int(totals[1])

    def expert_load(self) -> torch.Tensor:
        """Return the number of tokens of each expert in the last iteration, summed over all ranks: int64
        [num_layers, num_moe_experts], on the CPU. All ranks must call this."""
        return self._expert_tokens()[0]

    def _expert_tokens(self) -> torch.Tensor:  # all tokens and, if counted, tokens beyond the capacities
        num_layers, num_experts = self.config.model.num_layers, self.config.model.num_moe_experts or 0
        tokens = routed_tokens(self.model_chunks, num_layers, num_experts, with_repaid=self._repays)
        dist.all_reduce(tokens, group=self.groups.vote)
        return tokens

    def _start_iteration(self, iteration: int) -> None:  # 0 for an evaluation
        self._current_iteration = iteration
        self._delayed_scaling.begin()
        owed = self.history.owed(self._counted_layers) if self._repays else {}
        for layer in self._mixture_layers:
            layer.start_iteration(iteration, owed.get(layer.layer_number, ()))

    def _run_microbatches(self, split: str, number: int, *, forward_only: bool) -> list[torch.Tensor]:
        """Run batch ``number`` of ``split`` through the pipeline. In training, ``number`` is the iteration."""
        pg, reader = self.pg, self.reader(split, number)
        batch = reader.plan
        reports: list[torch.Tensor] = self.forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=[reader.microbatches(number) for _ in self.model_chunks],
            model=self.model_chunks,
            num_microbatches=batch.num_microbatches,
            seq_length=self.config.model.seq_length,
            micro_batch_size=batch.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self.p2p,
            pg_collection=pg,
        )
        return reports

    def reader(self, split: str, number: int) -> BatchReader:
        """Return the reader of this rank's microbatches in batch ``number`` of ``split``."""
        config, samples = self.config, self.samples[split]
        return BatchReader.of(
            self.pg,
            samples=samples,
            plan=self.batch.at(number) if split == "train" else replace(self.batch, schedule=None),
            seq_length=config.model.seq_length,
            device=self.device,
            rules=DocumentRules.of(config.data, samples),
        )

    def _forward_step(self, microbatches: Iterator[Microbatch], model: torch.nn.Module) -> Any:
        self.num_forward_passes += 1
        return forward_step(microbatches, model, iteration=self._current_iteration)

    def _finalize_gradients(self, *args: Any, **kwargs: Any) -> None:
        failpoints.hit("grad_sync", self._current_iteration)
        finalize_model_grads(*args, **kwargs)
        # Only now ``main_grad`` is final: Megatron has reduced and scaled it, even with ``overlap_grad_reduce``.
        if self.replica_gradients is not None:
            self.replica_gradients.sum()
        self._delayed_scaling.combine(self.pg.tp_dp_cp)

    def _own_share(self, reports: list[torch.Tensor]) -> tuple[float, int]:
        # Returns (loss sum, number of tokens) for the ballot: zeros on TP ranks above 0, which have the same values.
        if not reports or self.pg.tp.rank() != 0:
            return 0.0, 0
        loss_sum, num_tokens = torch.stack(reports).sum(dim=0).tolist()
        return loss_sum, int(num_tokens)

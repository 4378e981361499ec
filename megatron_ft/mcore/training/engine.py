"""The training engine: one rank's model and optimizer, run iteration by iteration up to the commit point."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.checkpoint.rng import seed_rng
from megatron_ft.mcore.data.batches import BatchReader, Microbatch, Samples, plan_batches
from megatron_ft.mcore.groups import Groups
from megatron_ft.mcore.model.build import build_model
from megatron_ft.mcore.model.release import release_caches
from megatron_ft.mcore.model.transformer_config import build_transformer_config, moe_layer_pattern
from megatron_ft.mcore.moe.layer import MixtureLayer
from megatron_ft.mcore.moe.observation import expert_load, forget_auxiliary_losses, take_auxiliary_losses
from megatron_ft.mcore.moe.replica_gradients import ReplicaGradients
from megatron_ft.mcore.moe.replicas import Replicas
from megatron_ft.mcore.moe.trace_router import router_builder
from megatron_ft.mcore.optimizer import commit
from megatron_ft.mcore.optimizer.build import build_optimizer, build_scheduler, set_position
from megatron_ft.mcore.optimizer.state_copies import StateCopies
from megatron_ft.mcore.pipeline.boundaries import Boundaries
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.mcore.training.forward import forward_step
from megatron_ft.mcore.training.iteration import IterationResult, IterationState
from megatron_ft.mcore.training.reporting import StragglerTimer
from megatron_ft.planning.commit import Ballot, CommitPolicy, Decision, History, Vote, WindowReport, tally
from megatron_ft.planning.placement.copies import StateCopyPlan
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.runtime.vote import exchange

_BUILT = ("model_chunks", "optimizer", "scheduler", "p2p", "transformer_config", "_mixture_layers")
_OPTIONAL = ("replica_gradients", "state_copies")


class TrainingEngine:
    """Model, optimizer and data of one rank.

    Args:
        config: the job.
        device: device of this rank.
        transformer_impl: ``local`` or ``transformer_engine``.
        vocab_size: padded vocabulary.
        samples: token sequences of the splits ``train`` and ``valid``.
        stop_requested: whether this rank was asked to end the run; sent with the vote.
    """

    model_chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def __init__(
        self,
        config: JobConfig,
        *,
        device: torch.device,
        transformer_impl: str,
        vocab_size: int,
        samples: Mapping[str, Samples],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.device = device
        self.transformer_impl = transformer_impl
        self.vocab_size = vocab_size
        self.samples = samples
        self.stop_requested = stop_requested
        self.change_requested: Callable[[], bool] = lambda: False  # whether nodes join or leave: the vote carries it
        self.iteration = 0
        self.history = History()
        self.newest_vote: Vote | None = None
        """Vote of the newest iteration; None before the first iteration of this process."""
        self.in_progress: IterationState | None = None
        """The iteration that has begun and is not finished, or the one that stopped the run."""
        self.wants_load: Callable[[int], bool] = lambda _: False
        """Whether tokens per expert are summed over the job before the vote; every rank with the vote then knows the
        sums."""
        self.before_update: Callable[[], None] | None = None
        """Called before master weights, moments and compute weights change."""
        self.window_report: Callable[[], WindowReport] = WindowReport
        """Returns the state of this rank's windows for the vote."""
        self.boundaries = Boundaries()
        self.num_forward_passes = 0  # of a microbatch through a chunk
        self._router = router_builder(config)
        self._straggler_timer = StragglerTimer.on(device)
        self.policy = CommitPolicy.of(config)

    # -- life ---------------------------------------------------------------------------------------------

    def build(self, groups: Groups, replicas: Replicas | None = None) -> None:
        """Build model, optimizer and communication on ``groups``; weights are the initial ones.

        ``replicas`` places the experts of this stage; None uses Megatron's own layout.
        """
        failpoints.hit("build", self.iteration)
        self.groups = groups
        self.pg = groups.pg_collection
        seed_rng(self.config.training.seed, self.pg)
        self._assemble(replicas)

    @property
    def is_built(self) -> bool:
        """Whether there is a model whose state can be extracted."""
        # Of what carries state the scheduler is built last: where it is, model and optimizer are complete.
        return "scheduler" in self.__dict__

    def rebuild(self, replicas: Replicas | None) -> None:
        """Build model and optimizer again on the same groups; the caller restores weights and moments."""
        state = self.train_state()
        self._release()
        failpoints.hit("migrate_build", self.iteration + 1)
        self._assemble(replicas)
        self.restore(state)
        set_position(self.scheduler, self.iteration * self.config.training.global_batch_size)

    def _assemble(self, replicas: Replicas | None) -> None:
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
        self.state_copies: StateCopies | None = None
        self.replica_gradients = None if replicas is None else ReplicaGradients(self.model_chunks, replicas, pg.ep)
        self.optimizer = build_optimizer(self.config, self.model_chunks, pg)
        self.scheduler = build_scheduler(self.config, self.optimizer)
        self._connect_schedule()
        self.batch = plan_batches(self.config.training, pg.dp.size(), pg.pp.size() if len(self.model_chunks) > 1 else 1)
        self._mixture_layers = [
            m for chunk in self.model_chunks for m in chunk.modules() if isinstance(m, MixtureLayer)
        ]
        self._straggler_timer.watch(self.model_chunks)

    def keep_copies(self, plan: StateCopyPlan, placement: PlacementPlan) -> StateCopies:
        """Keep copies of optimizer state on other ranks by ``plan``, from the present state on; collective."""
        self.state_copies = StateCopies(
            self.model_chunks,
            self.optimizer,
            self.config.optimizer,
            plan=plan,
            placement=placement,
            group=self.pg.ep,
        )
        return self.state_copies

    def teardown(self) -> None:
        """Release all objects that use the groups; the caller destroys the groups next."""
        failpoints.hit("teardown", self.iteration)
        self._release("pg", "groups")

    def _release(self, *others: str) -> None:
        forget_auxiliary_losses()
        release_caches()
        self.boundaries.release()
        for name in (*_BUILT, *_OPTIONAL, *others):
            self.__dict__.pop(name, None)  # what a build that broke has not made is not there
        # Modules and hooks refer to each other: only the collector frees them, and the groups that they hold.
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
        """Run iteration ``iteration`` (counted from 1) to its end, whatever the vote decides."""
        # Until the vote is settled, nothing changes that ``IterationState.before`` cannot put back.
        vote = self.vote(self.prepare(iteration))
        result = self.decide(vote)
        self.apply(result)
        if result.decision.action == "commit":
            self.gather()
        if result.decision.action != "stop":
            self.finish(vote, result.decision)
        return result

    def decide(self, vote: Vote) -> IterationResult:
        """Decide about the iteration in progress."""
        return IterationResult(
            vote=vote,
            decision=self.policy.decide(vote, self.history),
            learning_rate=self._learning_rate(),
            median_loss=self.history.median_loss,
            expert_load=self._of(vote.iteration).expert_load,
            pass_seconds=self._of(vote.iteration).pass_seconds,
        )

    def apply(self, result: IterationResult) -> None:
        """Commit, skip or roll back the iteration in this rank's own state."""
        in_progress = self._of(result.vote.iteration)
        if result.decision.action == "commit":
            self.commit(result.vote)
        elif result.decision.action == "skip":
            # Only the bias: the numbers that a skipped iteration drew stay drawn, and its loss scale holds.
            in_progress.before.restore_router_bias(self.model_chunks)
        else:
            # Stopped: the state is that before the iteration, so that a checkpoint of it is one.
            self._roll_back(in_progress)

    def _of(self, iteration: int) -> IterationState:
        in_progress = self.in_progress
        assert in_progress is not None and in_progress.iteration == iteration, f"iteration {iteration} has not begun"
        return in_progress

    def finish(self, vote: Vote, decision: Decision) -> None:
        """Make the iteration of ``vote`` the newest, after ``decision`` about it was carried out."""
        self.history = self.history.after(vote, decision, self.config.training.loss_spike_window)
        self.iteration = vote.iteration
        self.newest_vote = vote
        self.in_progress = None
        # Only now may a replay read what was logged: an attempt that broke has sent a part of it.
        self.boundaries.commit(vote)

    def prepare(self, iteration: int) -> Ballot:
        """Run forward, backward and gradient reduction of all microbatches, and the norm; make this rank's ballot."""
        # Before the vote, Megatron updates the router bias with the gradients and the loss scale with their norm.
        self.in_progress = in_progress = IterationState(iteration=iteration, before=self.train_state())
        reports = self.accumulate(iteration)
        # Summed before the vote: a survivor that finishes the iteration later has no others to sum with, and all
        # survivors must plan placements from the same loads.
        if self.wants_load(iteration):
            in_progress.expert_load = self.expert_load()
        # Read first: ``prepare`` updates the scale, and the vote logs the one that these gradients have.
        loss_scale = float(self.optimizer.get_loss_scale())
        found_inf, grad_norm = commit.prepare(self.optimizer)
        return self.ballot(reports, loss_scale=loss_scale, found_inf=found_inf, grad_norm=grad_norm)

    def accumulate(self, iteration: int) -> list[torch.Tensor]:
        """Run forward, backward and gradient reduction of all microbatches; return reports of the last stage, float64
        [2] each."""
        failpoints.hit("data", iteration)
        # A function of the iteration: a rank that has rolled back, replayed or joined gets the same learning rate.
        set_position(self.scheduler, (iteration - 1) * self.config.training.global_batch_size)
        self._start_iteration(iteration)
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        with self.boundaries.logging(iteration, self.groups.generation):
            return self._run_microbatches("train", iteration, forward_only=False)

    def ballot(self, reports: list[torch.Tensor], *, loss_scale: float, found_inf: bool, grad_norm: float) -> Ballot:
        """Make this rank's ballot for the accumulated iteration; empties the auxiliary losses."""
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
            **asdict(self.window_report()),
        )

    def vote(self, ballot: Ballot) -> Vote:
        """Exchange ballots over the whole job and return the vote."""
        iteration = ballot.iteration
        failpoints.hit("vote_before", iteration)
        in_progress = self._of(iteration)
        # Before the exchange: once the ballot may have left, others may settle the vote, and this rank must be able to
        # finish the iteration.
        in_progress.contributed = True
        ballots = exchange(ballot, self.groups.vote)
        in_progress.pass_seconds = tuple(each.pass_seconds for each in ballots)
        in_progress.vote = self.tally(ballots)
        failpoints.hit("vote_after", iteration)
        return in_progress.vote

    def tally(self, ballots: Sequence[Ballot]) -> Vote:
        """Combine the ballots of all ranks, in rank order."""
        num_moe_losses = self.batch.num_real_microbatches * sum(moe_layer_pattern(self.config.model))
        return tally(
            ballots,
            clip_grad=self.config.optimizer.clip_grad,
            num_moe_losses=num_moe_losses if self.config.model.num_moe_experts else 0,
        )

    def commit(self, vote: Vote) -> None:
        """Update master weights, moments and this rank's compute weights with the voted values."""
        failpoints.hit("update", vote.iteration)
        # A slice under way still copies the tensors that are about to change.
        if self.before_update is not None:
            self.before_update()
        # A replay has no iteration in progress: where it breaks, it starts again from its window.
        with nullcontext() if self.in_progress is None else self.in_progress.updating():
            commit.update(self.optimizer, self.config.optimizer.clip_grad, vote.grad_norm)

    def gather(self) -> None:
        """Update every rank's compute weights, and the copies of its optimizer state."""
        failpoints.hit("gather", self._current_iteration)
        commit.gather(self.optimizer, self.model_chunks)
        # Holders repeat the update from the clipped gradients, which are there until the next iteration begins.
        if self.state_copies is not None:
            self.state_copies.follow(self._learning_rate())

    def train_state(self) -> TrainState:
        """Copy the state of this rank at this iteration boundary besides parameters and their optimizer state."""
        return TrainState.capture(self.model_chunks, self.optimizer, iteration=self.iteration, history=self.history)

    def restore(self, state: TrainState) -> None:
        """Restore ``state``; raises RecoveryError if it belongs to another model or optimizer."""
        state.restore(self.model_chunks, self.optimizer)
        self.iteration, self.history = state.iteration, state.history

    def abort(self) -> None:
        """Roll back the iteration in progress, if there is one; it is not committed."""
        if self.in_progress is not None:
            self._roll_back(self.in_progress)
        self.in_progress = None

    def _roll_back(self, in_progress: IterationState) -> None:
        # No weight has changed. Gradients may stay: the next iteration zeroes their buffers when it starts.
        self.restore(in_progress.before)
        set_position(self.scheduler, self.iteration * self.config.training.global_batch_size)

    # -- reading ------------------------------------------------------------------------------------------

    def evaluate(self) -> tuple[float, int]:
        """Return (mean loss per token, tokens) over ``training.eval_iterations`` batches of the validation split."""
        for chunk in self.model_chunks:
            chunk.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch in range(1, self.config.training.eval_iterations + 1):
                # For each batch: forced routing counts microbatches, and layouts differ in their padding.
                self._start_iteration(0)
                reports = self._run_microbatches("valid", batch, forward_only=True)
                totals += torch.tensor(self._own_share(reports), dtype=torch.float64)
        for chunk in self.model_chunks:
            chunk.train()
        dist.all_reduce(totals, group=self.groups.vote)
        return float(totals[0] / totals[1]), int(totals[1])

    def expert_load(self) -> torch.Tensor:
        """Return tokens per expert over the job in the last iteration: int64 [num_layers, num_moe_experts], CPU."""
        model = self.config.model
        load = expert_load(self.model_chunks, model.num_layers, model.num_moe_experts or 0)
        dist.all_reduce(load, group=self.groups.vote)
        return load

    # -- parts --------------------------------------------------------------------------------------------

    def _start_iteration(self, iteration: int) -> None:  # 0: an evaluation
        self._current_iteration = iteration
        for layer in self._mixture_layers:
            layer.start_iteration(iteration)

    def _run_microbatches(self, split: str, number: int, *, forward_only: bool) -> list[torch.Tensor]:
        """Run batch ``number`` of a split through the pipeline (for training, that of iteration ``number``)."""
        pg, batch = self.pg, self.batch
        reader = BatchReader.of(
            pg, samples=self.samples[split], plan=batch, seq_length=self.config.model.seq_length, device=self.device
        )
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

    def _forward_step(self, microbatches: Iterator[Microbatch], model: torch.nn.Module) -> Any:
        self.num_forward_passes += 1
        return forward_step(microbatches, model, iteration=self._current_iteration)

    def _finalize_gradients(self, *args: Any, **kwargs: Any) -> None:
        failpoints.hit("grad_sync", self._current_iteration)
        finalize_model_grads(*args, **kwargs)
        # After Megatron has reduced and scaled ``main_grad``: with ``overlap_grad_reduce`` it changes until then.
        if self.replica_gradients is not None:
            self.replica_gradients.sum()

    def _own_share(self, reports: list[torch.Tensor]) -> tuple[float, int]:
        # Return the (loss sum, tokens) that this rank reports: tensor-parallel ranks have the same loss, so one reports
        # it.
        if not reports or self.pg.tp.rank() != 0:
            return 0.0, 0
        loss_sum, num_tokens = torch.stack(reports).sum(dim=0).tolist()
        return loss_sum, int(num_tokens)

    def _learning_rate(self) -> float:
        return float(max(group["lr"] for group in self.optimizer.param_groups))

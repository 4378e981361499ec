"""Loads one rank's slices of a window (snapshot over several iterations), and replays the window's iterations."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from megatron_ft import failpoints
from megatron_ft.config.identity import Settings
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.groups import Collectives
from megatron_ft.mcore.model.transformer_config import named_parameters, unwrap
from megatron_ft.mcore.optimizer import adamw
from megatron_ft.mcore.state.operator_view import OperatorView, Payload
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.operators import OperatorId, operator_of
from megatron_ft.planning.iteration import WINDOW_FIELDS, Ballot, Vote
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.lost_tokens import Rows
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.storage.run_settings import SETTINGS
from megatron_ft.snapshot.storage.window_folder import window_digest
from megatron_ft.snapshot.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayStep:
    """Step of a replay: it loads the next slice, if one is left, and then runs the next iteration, if one is left."""

    load: int | None
    """Index of the slice to load; None if all slices were loaded in earlier steps."""
    active: tuple[OperatorId, ...]
    """Operators of which at least one part (range of tensor elements) has been loaded with its full state."""
    frozen: tuple[OperatorId, ...]
    """Operators with compute weights only: they compute outputs and input gradients, but are not updated."""
    vote: Vote | None
    """Committed vote of the iteration to run; None if this is the last step and only loads a slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The steps of a replay, which makes the dense state after ``final_iteration`` from a window (MoEvement, section
    3.3).

    The state is *dense* (complete for all operators) once the last slice is loaded. From then on, iterations run as in
    training.
    """

    start_iteration: int
    """Iteration after which slice 0 was captured."""
    steps: tuple[_ReplayStep, ...]

    @property
    def final_iteration(self) -> int:
        """Iteration of the state at the end of the replay."""
        return self.start_iteration + len(self.iterations)

    @property
    def iterations(self) -> tuple[int, ...]:
        """Iterations that the replay runs again."""
        return tuple(step.vote.iteration for step in self.steps if step.vote is not None)

    def validate(self) -> None:
        """Assert that slices are loaded in order, iterations are consecutive, and no operator stays frozen."""
        assert self.steps, "the replay has no step"
        loads = [step.load for step in self.steps if step.load is not None]
        assert loads and loads == list(range(len(loads))), "slices are not loaded in order"
        assert all(step.load is None for step in self.steps[len(loads) :]), "slices are not loaded in consecutive steps"
        expected = tuple(range(self.start_iteration + 1, self.final_iteration + 1))
        assert self.iterations == expected, f"the plan replays the iterations {self.iterations} instead of {expected}"
        assert all(step.vote is not None for step in self.steps[:-1]), "a step before the last one has no vote"
        assert not self.steps[len(loads) - 1].frozen, "operators are still frozen after the last slice"
        for before, after in self._pairs():
            assert set(before.active) <= set(after.active), f"slice {after.load} freezes an active operator"
            everything = set(before.active) | set(before.frozen)
            assert everything == set(after.active) | set(after.frozen), (
                f"slice {after.load} has other operators than the slice before"
            )
            assert not set(before.active) & set(before.frozen), f"slice {before.load} contains an operator twice"

    def summary(self) -> str:
        frozen = sum(len(step.frozen) for step in self.steps if step.vote is not None)
        total = sum(len(step.frozen) + len(step.active) for step in self.steps if step.vote is not None)
        share = f", {100 * frozen / total:.0f} % of operators frozen on average" if total else ""
        return (
            f"window of iteration {self.start_iteration}: {sum(step.load is not None for step in self.steps)} slices "
            f"loaded, {len(self.iterations)} iterations replayed up to iteration {self.final_iteration}{share}"
        )

    def _pairs(self) -> Iterator[tuple[_ReplayStep, _ReplayStep]]:
        return zip(self.steps, self.steps[1:], strict=False)

    @classmethod
    def of(
        cls, window: WindowPlan, start_iteration: int, votes: Mapping[int, Vote], *, until: int | None = None
    ) -> "ReplayPlan":
        """Plan the replay of a window whose slice 0 was captured after ``start_iteration``.

        Args:
            votes: logged votes by iteration, for all iterations to run.
            until: last iteration to run, not before the window's last iteration; None for the window's last iteration.

        Raises:
            RecoveryError: the vote of an iteration is missing, or ``until`` is before the last iteration of the window.
        """
        dense = start_iteration + window.num_iterations - 1
        last = dense if until is None else until
        if last < dense:
            raise RecoveryError(
                f"window of iteration {start_iteration}: its state is complete only after iteration {dense}, but the "
                f"replay must end after iteration {last}"
            )
        steps = []
        for index in range(max(window.num_iterations, last - start_iteration)):
            iteration, slice_index = start_iteration + index + 1, min(index, window.num_iterations - 1)
            if iteration <= last and iteration not in votes:
                raise RecoveryError(
                    f"the log of votes (results of all ranks) lacks iteration {iteration}; it has {sorted(votes)}"
                )
            active = {unit.operator for unit in window.active(slice_index)}
            # Parts are ranges of the same tensors, so one active part requires the gradients of all parts.
            frozen = {unit.operator for unit in window.frozen(slice_index)} - active
            steps.append(
                _ReplayStep(
                    # After the last slice nothing is left to load, and iterations run as in training.
                    load=index if index == slice_index else None,
                    active=tuple(sorted(active, key=str)),
                    frozen=tuple(sorted(frozen, key=str)),
                    vote=votes[iteration] if iteration <= last else None,
                )
            )
        plan = cls(start_iteration=start_iteration, steps=tuple(steps))
        plan.validate()
        return plan


class _ReplayEngine(Protocol):
    """Interface of one rank's engine during the replay of a window. All ranks that replay must make the same calls."""

    def load(self, index: int) -> None:
        """Load slice ``index`` of the window. Slice 0 also restores random number generators, counters and history."""
        ...

    def replay(self, vote: Vote, frozen: Collection[OperatorId]) -> None:
        """Run the iteration of the logged ``vote`` again. Operators in ``frozen`` lack full state and are not updated.

        Raises:
            RecoveryError: the new vote of this iteration differs from ``vote``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Cost and result of a replay on this rank."""

    final_iteration: int
    """Last iteration that was run again. The replay ends with the complete state after this iteration."""
    num_iterations: int
    load_seconds: float
    replay_seconds: float


def carry_out(plan: ReplayPlan, engine: _ReplayEngine) -> ReplayResult:
    """Bring ``engine`` to the complete state after ``plan.final_iteration``. All ranks that replay must call this.

    Raises:
        RecoveryError: the vote of a replayed iteration differs from the logged vote.
    """
    # Validate before the first step: if a rank failed later, the other ranks would wait for it in a collective.
    plan.validate()
    load_seconds = replay_seconds = 0.0
    for step in plan.steps:
        started = time.monotonic()
        if step.load is not None:
            engine.load(step.load)
        loaded = time.monotonic()
        if step.vote is not None:
            engine.replay(step.vote, step.frozen)
        load_seconds += loaded - started
        replay_seconds += time.monotonic() - loaded
    return ReplayResult(
        final_iteration=plan.final_iteration,
        num_iterations=len(plan.iterations),
        load_seconds=load_seconds,
        replay_seconds=replay_seconds,
    )


def parameters_of(
    model_chunks: Sequence[torch.nn.Module], operators: Collection[OperatorId], num_layers: int
) -> set[torch.nn.Parameter]:
    """Return the parameters of ``operators`` (units of a snapshot, e.g. one expert) on this rank."""
    return {
        parameter
        for chunk in model_chunks
        for name, parameter in named_parameters(chunk)
        if operator_of(name, num_layers) in operators
    }


@contextmanager
def frozen(
    model_chunks: Sequence[torch.nn.Module], parameters: Collection[torch.nn.Parameter]
) -> Iterator[Callable[[], None]]:
    """Compute no gradients for ``parameters`` until the yielded function is called, or until the block ends. The caller
    must call the function after backward and before gradients are reduced. Gradients of inputs do not change: for a
    weight without ``requires_grad``, Megatron's linear layers skip only the gradient of the weight."""
    taken = [parameter for parameter in parameters if parameter.requires_grad]
    hooks = [_keep_gradients_flowing(chunk) for chunk in model_chunks if hasattr(unwrap(chunk), "embedding")]

    def thaw() -> None:
        for parameter in taken:
            parameter.requires_grad_(True)

    for parameter in taken:
        parameter.requires_grad_(False)
    try:
        yield thaw
    finally:
        thaw()
        for hook in hooks:
            hook.remove()


def _keep_gradients_flowing(chunk: torch.nn.Module) -> Any:
    # The output of a frozen embedding must require gradients, because recomputation of activations needs such an input.

    def require_gradient(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    return unwrap(chunk).embedding.register_forward_hook(require_gradient)  # type: ignore[union-attr, operator]


@contextmanager
def synchronous_reduction(model_chunks: Sequence[torch.nn.Module], config: Any) -> Iterator[None]:
    """Reduce gradients after the last backward pass, not during it. An overlapped reduction waits until all parameters
    of a bucket have gradients, so it would wait forever for frozen parameters."""
    ddp_configs = [chunk.ddp_config for chunk in model_chunks]
    overlapped = [ddp_config.overlap_grad_reduce for ddp_config in ddp_configs]
    grad_sync_func = config.grad_sync_func
    config.grad_sync_func = None
    for ddp_config in ddp_configs:
        ddp_config.overlap_grad_reduce = False
    try:
        yield
    finally:
        config.grad_sync_func = grad_sync_func
        for ddp_config, was_overlapped in zip(ddp_configs, overlapped, strict=True):
            ddp_config.overlap_grad_reduce = was_overlapped


_OF_THE_JOB = ("generation", "stop_requested", "change_requested", *WINDOW_FIELDS)
"""Fields of a vote that a replay does not compare, because they do not depend on the computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapturedSlice:
    """A slice of a window: what this rank captured from the state after one iteration."""

    payload: Payload
    train_state: Mapping[str, Any] | None = None
    """``TrainState.to_json`` of this rank; only with slice 0."""
    at_risk: Rows | None = None
    """Number of tokens, as [MoE layer][expert], whose updates the slice lacks; None if it contains all updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWindow:
    """One rank's part of the window from which the job continues. The checksums of all bytes have been verified."""

    window: Window
    slices: tuple[memoryview, ...]
    """The bytes of each slice."""
    stored: StoredWindow
    """Location of the bytes. If ``stored.where`` is ``own``, they are in buffer ``stored.buffer`` of this rank's memory
    on its node. Otherwise they are elsewhere, and ``stored.buffer`` contains this rank's newest committed window (None
    if there is no such window). The buffer ``stored.buffer`` must not be overwritten."""
    from_memory: frozenset[tuple[int, int]] = frozenset()
    """Experts, each as (index of its MoE layer among the MoE layers, id), whose state in a window from a file was
    replaced by newer state from memory."""

    @property
    def plan(self) -> WindowPlan:
        """Plan with which this window was captured."""
        return WindowPlan.from_json(self.window.plan)

    @property
    def plan_in_force(self) -> WindowPlan:
        """Plan of the windows after this one. It differs from ``plan`` if this window is a capture of the whole state
        in one slice after a recovery."""
        content = self.header(0, PLAN)
        return self.plan if content is None else WindowPlan.from_json(content)

    @property
    def digest(self) -> str:
        """Checksum of this rank's part of the window."""
        return window_digest([self.window.to_bytes().decode()])

    def header(self, index: int, name: str) -> Any:
        """Return the value of ``name`` in the header of slice ``index``, or None if the header does not have it."""
        text = self.window.slices[index].header.get(name)
        return None if text is None else json.loads(text)

    @property
    def at_risk(self) -> Rows | None:
        """Number of tokens, as [MoE layer][expert], whose updates the window lacks, because it copied experts from
        earlier windows. None if the window contains all updates."""
        rows = self.header(0, AT_RISK)
        return None if rows is None else tuple(tuple(row) for row in rows)

    def replay_plan(self, *, until: int | None = None, votes: Mapping[int, Vote] | None = None) -> ReplayPlan:
        """Plan the replay that turns this window into the complete state after one iteration.

        Args:
            until: last iteration to run again; None for the last iteration of the window.
            votes: votes of the iterations after the window.

        Raises:
            RecoveryError: the window's plan, a vote or the train state is missing or cannot be read.
        """
        start, where = self.window.start_iteration, f"window of iteration {self.window.start_iteration}"
        try:
            logged = [Vote.from_record(self.header(index, VOTE)) for index in range(self.window.num_slices)]
            known = {**(votes or {}), **{vote.iteration: vote for vote in logged}}
            replay = ReplayPlan.of(self.plan, start, known, until=until)
            extras = self.header(0, EXTRAS)
            self.header(0, PLACEMENT)
            if (self.at_risk is None) != (self.window.slices[0].captured_at is None):
                raise ValueError(f"slice 0 has only one of {AT_RISK} and captured_at: must have both or neither")
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise RecoveryError(f"{where}: its plan or a slice's header cannot be read: {error!r}") from error
        num_slices = sum(step.load is not None for step in replay.steps)
        if num_slices != self.window.num_slices:
            raise RecoveryError(f"{where}: has {self.window.num_slices} slices, but {num_slices} are planned")
        if not isinstance(extras, dict):
            raise RecoveryError(f"{where}: the header of slice 0 has no train state")
        return replay

    def problem_in(self, view: OperatorView) -> str | None:
        """Return why this window cannot be loaded into the model and optimizer of ``view``, or None if it can."""
        for index, part in enumerate(self.window.slices):
            if part.pieces != view.pieces(self.plan, index):
                start = self.window.start_iteration
                return (
                    f"window of iteration {start}: slice {index} has other parts of the parameters than this rank has "
                    "now; load the window with the parallel layout and the number of ranks of its capture"
                )
        return None


class Replayer:
    """Implements ``_ReplayEngine`` for a built engine and a window.

    Ranks of the whole job, or of some pipeline stages, replay together, and must make the same calls. A replay does not
    update the copies of optimizer state on other ranks: the caller must call ``TrainingEngine.keep_copies`` after it.

    Args:
        view: view of the current model and optimizer of ``engine``.
        window: plan of the window.
        slices: slices that this rank captured, in the order of the window.
        skip_frozen: whether to skip the weight gradients of frozen operators. The result does not depend on this.
        collectives: collectives of the ranks that replay; None for the whole job. Only a replay of the whole job
            compares its results with the logged votes.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        view: OperatorView,
        *,
        window: WindowPlan,
        slices: Sequence[_CapturedSlice],
        skip_frozen: bool = True,
        collectives: Collectives | None = None,
    ) -> None:
        self._engine = engine
        self._view = view
        self._window = window
        self._slices = slices
        self._skip_frozen = skip_frozen
        self._collectives = Collectives(engine.groups.vote) if collectives is None else collectives
        self._is_whole = self._collectives.num_ranks == engine.groups.vote.size()
        self.staged_bytes = 0
        """Largest number of bytes that this rank has sent and received at one time while it loaded a slice."""

    def load(self, index: int) -> None:
        """Restore slice ``index`` on every rank that has any of its elements. Slice 0 also restores the ``TrainState``.

        Raises:
            RecoveryError: the captured bytes or the ``TrainState`` belong to another parallel layout.
        """
        captured = self._slices[index]
        self.staged_bytes = max(self.staged_bytes, self._view.restore(self._window, index, captured.payload))
        # Later slices contain only tensors, because the replay has computed the rest of the state by then.
        if index == 0:
            error = self._collectives.errors(self._restore(captured.train_state, captured.at_risk))
            if error is not None:
                raise RecoveryError(error)

    def replay(self, vote: Vote, operators: Collection[OperatorId]) -> None:
        """Run the iteration of ``vote`` again, and commit or skip it as before. Do not update ``operators``.

        Raises:
            RecoveryError: the iteration is not the next one, had stopped the run, or has other results than ``vote``.
        """
        engine = self._engine
        if vote.iteration != engine.iteration + 1:
            raise RecoveryError(
                f"cannot replay iteration {vote.iteration}: must be the state's next iteration, {engine.iteration + 1}"
            )
        failpoints.hit("replay", vote.iteration)
        before = engine.train_state()
        unchanged = parameters_of(engine.model_chunks, operators, engine.config.model.num_layers)
        ballot = self._accumulate(vote, unchanged)
        if self._is_whole:
            self._compare(vote, ballot)
        decision = engine.policy.decide(vote, engine.history)
        if decision.action == "commit":
            engine.commit(vote)
            adamw.gather(engine.optimizer, engine.model_chunks)
        elif decision.action == "skip":
            before.restore_router_bias(engine.model_chunks)
        else:
            raise RecoveryError(f"iteration {vote.iteration} stopped the run and cannot be replayed: {decision.reason}")
        engine.finish(vote, decision)

    def _restore(self, record: Mapping[str, Any] | None, at_risk: Rows | None) -> str | None:
        # Restores this rank's state besides tensors. Returns the error, which may concern only this rank.
        if record is None:
            return "slice 0 has no train state: random numbers, buffers and history are missing"
        try:
            state = TrainState.from_json(record)
            if at_risk is not None:
                state = replace(state, history=state.history.after_loss(at_risk))
            self._engine.restore(state)
        except RecoveryError as error:
            return str(error)
        except (KeyError, TypeError, ValueError) as error:
            return f"the train state of slice 0 cannot be read: {error!r}"
        return None

    def _accumulate(self, vote: Vote, unchanged: Collection[Any]) -> Ballot:
        engine = self._engine
        config: Any = engine.transformer_config
        finalize = config.finalize_model_grads_func
        skipped = unchanged if self._skip_frozen else ()
        with synchronous_reduction(engine.model_chunks, config), frozen(engine.model_chunks, skipped) as thaw:

            def thaw_and_finalize(*args: Any, **kwargs: Any) -> None:
                # Frozen parameters stay in the gradient buckets, with zeros, so that sums keep the same order.
                thaw()
                finalize(*args, **kwargs)

            config.finalize_model_grads_func = thaw_and_finalize
            try:
                reports = engine.accumulate(vote.iteration)
            finally:
                config.finalize_model_grads_func = finalize
        loss_scale = float(engine.optimizer.get_loss_scale())
        adamw.prepare_known(engine.optimizer, found_inf=vote.found_inf, without=unchanged)
        return engine.ballot(reports, loss_scale=loss_scale, found_inf=vote.found_inf, grad_norm=vote.grad_norm)

    def _compare(self, logged: Vote, mine: Ballot) -> None:
        # Every rank compares the new results with the logged vote, to detect a wrong recovery.
        ballots = [Ballot(**record) for record in self._collectives.gather(asdict(mine))]
        before, now = logged.to_record(), self._engine.tally(ballots).to_record()
        # Compare texts, because NaN then equals NaN, and numbers are equal only if their bits are equal.
        changed = [name for name in before if name not in _OF_THE_JOB and repr(before[name]) != repr(now[name])]
        if changed:
            what = ", ".join(f"{name}={now[name]!r} instead of {before[name]!r}" for name in changed)
            raise RecoveryError(
                f"the replay of iteration {logged.iteration} had other results than the iteration itself: {what}"
            )

    @classmethod
    def open(cls, engine: TrainingEngine, window: LocalWindow, collectives: Collectives) -> "Replayer":
        """Create the ``Replayer`` of ``window`` for ``engine``. All ranks of ``collectives`` must call this.

        Raises:
            RecoveryError: the window has other element ranges of the parameters than these ranks.
        """
        config = engine.config
        view = OperatorView(
            engine.model_chunks,
            engine.optimizer,
            groups=replace(engine.groups, vote=collectives.group),
            num_layers=config.model.num_layers,
        )
        error = collectives.errors(window.problem_in(view))
        if error is not None:
            raise RecoveryError(error)
        slices = [
            _CapturedSlice(payload=content, train_state=window.header(index, EXTRAS), at_risk=window.at_risk)
            for index, content in enumerate(window.slices)
        ]
        skip_frozen = config.snapshot.skip_frozen_gradients
        return cls(engine, view, window=window.plan, slices=slices, skip_frozen=skip_frozen, collectives=collectives)


EXTRAS, PLACEMENT, CONFIG, VOTE, PLAN = "extras", "placement", "config", "vote", "plan_in_force"
AT_RISK = "tokens_at_risk"
"""Names of values in the header of a slice, in addition to ``SETTINGS``. The values are JSON texts, because a
manifest is strict JSON and cannot contain NaN."""


def first_header(
    state: TrainState, placement: Any, config: Mapping[str, Any], settings: Settings
) -> Callable[[], dict[str, str]]:
    """Return a function that makes the header of the first slice of a window.

    Args:
        state: train state of this rank.
        placement: JSON form of the placement, or None.
        config: result of ``replay_config``.
        settings: settings of the job.
    """
    return lambda: {
        EXTRAS: json.dumps(state.to_json()),
        PLACEMENT: json.dumps(placement),
        CONFIG: json.dumps(config),
        SETTINGS: json.dumps(settings),
    }


_REPLAYED_GROUPS = ("model", "parallel", "optimizer", "precision", "training")
_REPLAYED_PLACEMENT = ("algorithm", "num_slots_per_rank", "shares")


_OF_THE_RUN = (
    *("exit_at_iteration", "exit_interval_iterations", "exit_after_minutes"),
    *("eval_interval_iterations", "eval_iterations", "evaluate_only", "digest_interval_iterations"),
)
"""Keys of ``training`` that may change between capture and replay, because they do not affect results."""


def replay_config(config: JobConfig, fingerprint: str, *, device: str, transformer_impl: str) -> dict[str, Any]:
    """Return the configuration that determines the results of an iteration: values by dotted key, and under ``data``
    the fingerprint of the data.

    A window can be replayed only with the same values as those with which it was captured.

    Args:
        device: ``cpu`` or ``cuda``: the resolved ``training.device``.
        transformer_impl: ``local`` or ``transformer_engine``: the resolved ``training.transformer_impl``.
    """
    groups = to_dict(config)
    groups["training"] |= {"device": device, "transformer_impl": transformer_impl}
    # Include the backend, because the order of sums depends on it.
    groups["parallel"]["device_backend"] = config.parallel.backend_on(device)
    placement = {f"placement.{name}": groups["placement"][name] for name in _REPLAYED_PLACEMENT}
    return {"data": fingerprint, **placement} | {
        f"{group}.{name}": value
        for group in _REPLAYED_GROUPS
        for name, value in groups[group].items()
        if not (group == "training" and name in _OF_THE_RUN)
    }

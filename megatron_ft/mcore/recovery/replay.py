"""Loads captured slices into an engine, and runs logged iterations again with the same bits."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megatron_ft import failpoints
from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.model.names import named_parameters, unwrap
from megatron_ft.mcore.optimizer import commit
from megatron_ft.mcore.snapshot.local_window import EXTRAS, LocalWindow
from megatron_ft.mcore.state.operator_view import OperatorView
from megatron_ft.mcore.state.restoring import Payload
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.operator_state import operator_of
from megatron_ft.operators import OperatorId
from megatron_ft.planning.commit import WINDOW_FIELDS, Ballot, Vote
from megatron_ft.planning.snapshot.plan import WindowPlan


def parameters_of(
    model_chunks: Sequence[torch.nn.Module], operators: Collection[OperatorId], num_layers: int
) -> set[torch.nn.Parameter]:
    """Return the parameters of ``operators`` on this rank."""
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
    must call the function after backward and before gradients are reduced. Input gradients do not change, because
    Megatron's linear layers only skip the gradient of a weight without ``requires_grad``."""
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
    # The output of a frozen embedding must require gradients, because activation recomputation needs input gradients.

    def require_gradient(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    return unwrap(chunk).embedding.register_forward_hook(require_gradient)  # type: ignore[union-attr, operator]


@contextmanager
def synchronous_reduction(model_chunks: Sequence[torch.nn.Module], config: Any) -> Iterator[None]:
    """Reduce gradients after the last backward pass, not during it. An overlapped reduction waits until all parameters
    of a bucket have gradients, but frozen parameters get none."""
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
    """A slice that this rank captured."""

    payload: Payload
    train_state: Mapping[str, Any] | None = None
    """``TrainState.to_json`` of this rank; only with slice 0."""


class Replayer:
    """Implements ``runtime.engine.ReplayEngine`` for a built engine and a window.

    All ranks that replay, either the whole job or some pipeline stages, must make the same calls. A replay does not
    update copies of optimizer state on other ranks: the caller must call ``TrainingEngine.keep_copies`` after it.

    Args:
        view: view of the current model and optimizer of ``engine``.
        window: plan of the window.
        slices: slices of this rank, in the order of the window.
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

    def load(self, index: int) -> None:
        """Restore slice ``index`` on every rank that has any of its elements. Slice 0 also restores the ``TrainState``.

        Raises:
            RecoveryError: the captured bytes or the ``TrainState`` belong to another layout.
        """
        captured = self._slices[index]
        self._view.restore(self._window, index, captured.payload)
        # Later slices contain only tensors, because the replay has computed the rest of the state by then.
        if index == 0:
            error = self._collectives.errors(self._restore(captured.train_state))
            if error is not None:
                raise RecoveryError(error)

    def replay(self, vote: Vote, operators: Collection[OperatorId]) -> None:
        """Run the iteration of ``vote`` again, and commit or skip it as before. Do not update ``operators``.

        Raises:
            RecoveryError: the iteration is not the next one, it stopped the run, or its results differ from ``vote``.
        """
        engine = self._engine
        if vote.iteration != engine.iteration + 1:
            raise RecoveryError(
                f"cannot replay iteration {vote.iteration}: the state is after iteration {engine.iteration}"
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
            commit.gather(engine.optimizer, engine.model_chunks)
        elif decision.action == "skip":
            before.restore_router_bias(engine.model_chunks)
        else:
            raise RecoveryError(f"cannot replay iteration {vote.iteration}, which stopped the run: {decision.reason}")
        engine.finish(vote, decision)

    def _restore(self, record: Mapping[str, Any] | None) -> str | None:
        # Restores this rank's state besides tensors. Returns the error, which may concern only this rank.
        if record is None:
            return "slice 0 has no train state: random numbers, buffers and history are missing"
        try:
            self._engine.restore(TrainState.from_json(record))
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
                # Frozen parameters stay in the gradient buckets, with zeros, so that the order of sums does not change.
                thaw()
                finalize(*args, **kwargs)

            config.finalize_model_grads_func = thaw_and_finalize
            try:
                reports = engine.accumulate(vote.iteration)
            finally:
                config.finalize_model_grads_func = finalize
        loss_scale = float(engine.optimizer.get_loss_scale())
        commit.prepare_known(engine.optimizer, found_inf=vote.found_inf, without=unchanged)
        return engine.ballot(reports, loss_scale=loss_scale, found_inf=vote.found_inf, grad_norm=vote.grad_norm)

    def _compare(self, logged: Vote, mine: Ballot) -> None:
        # Every rank compares the results with the logged vote, so that a wrong recovery is detected.
        ballots = [Ballot(**record) for record in self._collectives.gather(asdict(mine))]
        before, now = logged.to_record(), self._engine.tally(ballots).to_record()
        # Compared as texts: NaN equals NaN, and numbers with the same digits have the same bits.
        changed = [name for name in before if name not in _OF_THE_JOB and repr(before[name]) != repr(now[name])]
        if changed:
            what = ", ".join(f"{name}={now[name]!r}, not {before[name]!r}" for name in changed)
            raise RecoveryError(
                f"the replay of iteration {logged.iteration} had other results than the logged vote: {what}"
            )

    @classmethod
    def open(cls, engine: TrainingEngine, window: LocalWindow, collectives: Collectives) -> "Replayer":
        """Create the ``Replayer`` of ``window`` for ``engine``. All ranks of ``collectives`` must call this.

        Raises:
            RecoveryError: the window was captured with other element ranges.
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
            _CapturedSlice(payload=content, train_state=window.header(index, EXTRAS))
            for index, content in enumerate(window.slices)
        ]
        skip_frozen = config.snapshot.skip_frozen_gradients
        return cls(engine, view, window=window.plan, slices=slices, skip_frozen=skip_frozen, collectives=collectives)

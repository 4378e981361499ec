"""Loads captured slices into an engine and runs logged iterations again, to the same bits."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_ft import failpoints
from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.checkpoint.agreement import Agreement
from megatron_ft.mcore.loop.engine import TrainingEngine
from megatron_ft.mcore.loop.extras import restore_extras
from megatron_ft.mcore.loop.frozen import frozen, parameters_of, synchronous_reduction
from megatron_ft.mcore.loop.undo import UndoRecord
from megatron_ft.mcore.optimizer import commit
from megatron_ft.mcore.optimizer.operator_view import OperatorView
from megatron_ft.mcore.optimizer.restoring import Payload
from megatron_ft.mcore.snapshot.local_window import EXTRAS, LocalWindow
from megatron_ft.operators import OperatorId
from megatron_ft.planning.commit import WINDOW_FIELDS, Ballot, Vote
from megatron_ft.planning.snapshot.plan import WindowPlan

_OF_THE_JOB = ("generation", "stop_requested", "change_requested", *WINDOW_FIELDS)
"""What a vote says of the job and its time, and not of the iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSlice:
    """What this rank captured: the bytes of a slice, and the extras (slice 0 only)."""

    payload: Payload
    extras: Mapping[str, Any] | None = None


class Replayer:
    """A window at hand in a built engine: the ``ReplayEngine`` of ``runtime.engine``. Collective over the ranks of
    ``agreement``, all of the job or all of a few pipeline stages.

    Copies of optimizer state on other ranks (``TrainingEngine.keep_copies``) do not follow a replay: the caller
    makes them anew when the state is dense.

    Args:
        view: of the engine's present model and optimizer.
        slices: of this rank, in the window's order.
        skip_frozen: leave out weight gradients of frozen operators; the result is the same without.
        agreement: of the ranks that replay; None for all of the job. What a few of them compute is no vote, and is not
            compared with one.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        view: OperatorView,
        *,
        window: WindowPlan,
        slices: Sequence[CapturedSlice],
        skip_frozen: bool = True,
        agreement: Agreement | None = None,
    ) -> None:
        self._engine = engine
        self._view = view
        self._window = window
        self._slices = slices
        self._skip_frozen = skip_frozen
        self._agreement = Agreement(engine.groups.vote) if agreement is None else agreement
        self._is_whole = self._agreement.num_ranks == engine.groups.vote.size()

    def load(self, index: int) -> None:
        """Put slice ``index`` back on every rank that holds any of it; with slice 0 the extras.

        Raises:
            RecoveryError: the captured bytes or extras are not of this layout.
        """
        captured = self._slices[index]
        self._view.restore(self._window, index, captured.payload)
        if index == 0:
            error = self._agreement.errors(self._restore_extras(captured.extras))
            if error is not None:
                raise RecoveryError(error)

    def replay(self, vote: Vote, operators: Collection[OperatorId]) -> None:
        """Run the iteration of ``vote`` again, operators ``operators`` frozen, and carry out what was decided on it.

        Raises:
            RecoveryError: the iteration is not the next one, or computes something else than ``vote`` says.
        """
        engine = self._engine
        if vote.iteration != engine.iteration + 1:
            raise RecoveryError(f"cannot replay iteration {vote.iteration} from the state after {engine.iteration}")
        failpoints.hit("replay", vote.iteration)
        undo = UndoRecord.take(engine.model_chunks, engine.optimizer)
        unchanged = parameters_of(engine.model_chunks, operators, engine.config.model.num_layers)
        ballot = self._accumulate(vote, unchanged)
        if self._is_whole:
            self._compare(vote, ballot)
        decision = engine.policy.decide(vote, engine.history)
        if decision.action == "commit":
            engine.commit(vote)
            commit.gather(engine.optimizer, engine.model_chunks)
        elif decision.action == "skip":
            undo.restore_expert_bias(engine.model_chunks)
        else:
            raise RecoveryError(f"iteration {vote.iteration} stopped the run and was not captured: {decision.reason}")
        engine.advance(vote, decision)

    def _restore_extras(self, extras: Mapping[str, Any] | None) -> str | None:
        """What is wrong with the extras of this rank; they are its own, so the others have to be told."""
        if extras is None:
            return "slice 0 has no extras: random numbers, buffers and history are missing"
        try:
            restore_extras(self._engine, extras)
        except RecoveryError as error:
            return str(error)
        except (KeyError, TypeError, ValueError) as error:
            return f"extras of slice 0 cannot be read: {error!r}"
        return None

    def _accumulate(self, vote: Vote, unchanged: Collection[Any]) -> Ballot:
        engine = self._engine
        config: Any = engine.transformer_config
        finalize = config.finalize_model_grads_func
        skipped = unchanged if self._skip_frozen else ()
        with synchronous_reduction(engine.model_chunks, config), frozen(engine.model_chunks, skipped) as thaw:

            def thaw_and_finalize(*args: Any, **kwargs: Any) -> None:
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
        """Every rank learns whether the job computed what it had computed before: a recovery is its own proof."""
        ballots = [Ballot(**record) for record in self._agreement.gather(asdict(mine))]
        before, now = logged.to_record(), self._engine.tally(ballots).to_record()
        # As text: NaN is what it is, and equal digits are equal bits.
        changed = [name for name in before if name not in _OF_THE_JOB and repr(before[name]) != repr(now[name])]
        if changed:
            what = ", ".join(f"{name}={now[name]!r}, not {before[name]!r}" for name in changed)
            raise RecoveryError(f"iteration {logged.iteration} was replayed to something else: {what}")


def open_replay(engine: TrainingEngine, window: LocalWindow, agreement: Agreement) -> Replayer:
    """``window`` at hand in ``engine``; collective over the ranks of ``agreement``, which replay it.

    Raises:
        RecoveryError: it was captured from other ranges of the state.
    """
    config = engine.config
    view = OperatorView(
        engine.model_chunks,
        engine.optimizer,
        groups=replace(engine.groups, vote=agreement.group),
        num_layers=config.model.num_layers,
    )
    error = agreement.errors(window.problem_in(view))
    if error is not None:
        raise RecoveryError(error)
    slices = [
        CapturedSlice(payload=content, extras=window.header(index, EXTRAS))
        for index, content in enumerate(window.slices)
    ]
    skip_frozen = config.snapshot.skip_frozen_gradients
    return Replayer(engine, view, window=window.plan, slices=slices, skip_frozen=skip_frozen, agreement=agreement)

"""Tests iterations that fail in any phase: the rank reports its position, and finishes or rolls back without its
peers."""

import contextlib
import time
from typing import Any

import pytest

from megatron_ft import failpoints
from megatron_ft.errors import RecoveryError
from megatron_ft.planning.recovery.membership import Target, choose_target
from megatron_ft.testing import engines
from tests.helpers.volatile import volatile_state

pytestmark = pytest.mark.slow  # trains

EVERYTHING = {
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
    "model.hidden_dropout": 0.1,
    "parallel.use_distributed_optimizer": False,
}
FP16 = {"precision.params_dtype": "fp16", "precision.initial_loss_scale": 64.0, "precision.loss_scale_window": 1}
BROKEN = 3
PHASES = {
    "data": (2, 2, 2),
    "forward": (2, 2, 2),
    "dispatch": (2, 2, 2),
    "backward": (2, 2, 2),
    "grad_sync": (2, 2, 2),
    "vote_before": (2, 2, 2),
    "vote_inside": (2, 3, 2),
    "vote_after": (2, 3, 3),
    "update": (2, 3, 3),
    "gather": (3, 3, 3),
}
"""Position (completed, contributed, settled) after iteration 3 fails, by phase."""


def whole_state(engine: Any) -> dict[str, str]:
    """Return the whole state except the counts of the last forward passes, which end with the model."""
    volatile = volatile_state(engine)
    counts = ("load.", "auxiliary.")
    kept = {name: value for name, value in volatile.items() if not name.startswith(counts)}
    return {**engines.digests(engine), **{name: value for name, value in kept.items() if "local_tokens" not in name}}


@contextlib.contextmanager
def broken_at(phase: str, overrides: dict[str, Any]) -> Any:
    """Return an engine whose iteration 3 has failed in ``phase``."""
    with engines.engine_of(engines.micro_config({**EVERYTHING, **overrides}), generation=0) as engine:
        failpoints.arm(
            [f'raise(at_iteration={BROKEN}, phase="{phase}")'], rank=0, node=0, record=lambda _: None, generation=0
        )
        try:
            engine.run_iteration(1)
            engine.run_iteration(2)
            with pytest.raises(failpoints.InjectedFault):
                engine.run_iteration(BROKEN)
            yield engine
        finally:
            failpoints.arm([], rank=0, node=0, record=lambda _: None)


@pytest.fixture(scope="module", params=[{}, FP16], ids=["fp32", "fp16"])
def undisturbed(request: pytest.FixtureRequest, megatron: None) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return the overrides, and state, vote and history of each iteration of a run without faults."""
    with engines.engine_of(engines.micro_config({**EVERYTHING, **request.param}), generation=0) as engine:
        known = {}
        for iteration in (1, 2, 3):
            vote = engine.run_iteration(iteration).vote
            known[iteration] = (whole_state(engine), vote, engine.history)
        return request.param, known


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_goes_on_from_wherever_it_broke(phase: str, undisturbed: tuple[dict, dict]) -> None:
    """The rank continues alone to the target that follows from its own position. The state is that of a run without the
    fault."""
    from megatron_ft.mcore.state.rank_status import position_of, resolve_iteration

    overrides, known = undisturbed
    with broken_at(phase, overrides) as engine:
        position = position_of(engine, rank=0)
        settled = 0 if position.vote is None else position.vote.iteration
        assert (position.completed, position.contributed, settled) == PHASES[phase]
        position.validate()
        target = choose_target([position])
        result = resolve_iteration(engine, target)
        state, vote, history = known[target.iteration]
        finished = target.iteration == BROKEN
        assert (None if result is None else repr(result.vote)) == (repr(vote) if finished else None)
        assert _comparable(whole_state(engine), finished) == _comparable(state, finished)
        assert (engine.iteration, engine.history) == (target.iteration, history)
        after = position_of(engine, rank=0)
        assert after.completed == after.contributed == target.iteration and repr(after.vote) == repr(vote)
        assert resolve_iteration(engine, Target(iteration=target.iteration, vote=None)) is None, "settled is settled"


@pytest.mark.parametrize("phase", ["vote_inside", "vote_after", "update"])
def test_a_rank_finishes_with_the_vote_of_another(phase: str, undisturbed: tuple[dict, dict]) -> None:
    """Another rank has the complete vote. This rank finishes with its own gradients and the values of the vote."""
    from megatron_ft.mcore.state.rank_status import position_of, resolve_iteration

    overrides, known = undisturbed
    state, vote, history = known[BROKEN]
    with broken_at(phase, overrides) as engine:
        assert position_of(engine, rank=0).contributed == BROKEN
        resolve_iteration(engine, Target.from_json(Target(iteration=BROKEN, vote=vote).to_json()))
        assert _comparable(whole_state(engine), True) == _comparable(state, True)
        assert (engine.iteration, engine.history) == (BROKEN, history)


@pytest.mark.parametrize("phase", ["vote_after", "gather"])
def test_the_duration_of_an_iteration_excludes_the_time_until_its_recovery(
    phase: str, megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ft.mcore.state.rank_status import position_of, resolve_iteration

    clock = time.perf_counter
    began = clock()
    with broken_at(phase, {}) as engine:
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1000.0)  # the failure is noticed late
        result = resolve_iteration(engine, choose_target([position_of(engine, rank=0)]))
        assert result is not None and 0.0 < result.seconds < clock() - began


def _comparable(state: dict[str, str], finished: bool) -> dict[str, str]:
    """Remove the learning rate, which is set when an iteration begins and differs after a rollback."""
    return state if finished else {name: value for name, value in state.items() if name != "learning_rates"}


def test_an_update_that_broke_is_no_state(undisturbed: tuple[dict, dict], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ft.mcore.optimizer import adamw
    from megatron_ft.mcore.state.rank_status import position_of

    def break_in_the_middle(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with engines.engine_of(engines.micro_config({**EVERYTHING, **undisturbed[0]})) as engine:
        engine.run_iteration(1)
        monkeypatch.setattr(adamw, "update", break_in_the_middle)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.run_iteration(2)
        with pytest.raises(RecoveryError, match="rank 5: iteration 2 failed in the middle of its update"):
            position_of(engine, rank=5)

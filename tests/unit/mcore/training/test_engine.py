"""Tests what a skipped or stopped iteration changes, and that reading state changes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ft import failpoints
from megatron_ft.testing import engines
from tests.helpers.volatile import volatile_state

pytestmark = pytest.mark.slow  # trains

EVERYTHING = {
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
    "model.hidden_dropout": 0.1,
    "training.max_consecutive_skips": 3,
}
FP16 = {"precision.params_dtype": "fp16", "precision.initial_loss_scale": 64.0, "precision.loss_scale_window": 1}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Make the loss NaN in the iterations of this list."""
    from megatron_ft.mcore.training import engine

    iterations: list[int] = []
    original = engine.forward_step

    def forward_step(microbatches: Any, model: torch.nn.Module, *, iteration: int) -> Any:
        output, loss = original(microbatches, model, iteration=iteration)
        return (output * float("nan") if iteration in iterations else output), loss

    monkeypatch.setattr("megatron_ft.mcore.training.engine.forward_step", forward_step)
    yield iterations


def expert_biases(engine: Any) -> dict[str, str]:
    return {name: digest for name, digest in engines.digests(engine).items() if "expert_bias" in name}


def test_a_skip_changes_no_weight_moment_or_bias(poisoned: list[int]) -> None:
    config = engines.micro_config({**EVERYTHING, "training.non_finite_policy": "skip"})
    with engines.engine_of(config) as engine:
        engine.run_iteration(1)
        engine.run_iteration(2)
        before = engines.digests(engine)
        assert len(expert_biases(engine)) == 2
        poisoned.append(3)
        result = engine.run_iteration(3)
        assert result.decision.action == "skip"
        assert (engine.iteration, engine.history.num_consecutive_skips) == (3, 1)
        assert engines.digests(engine) == before
        result = engine.run_iteration(4)
        assert result.decision.action == "commit"
        assert (engine.iteration, engine.history.num_consecutive_skips) == (4, 0)
        after = engines.digests(engine)
        assert after != before
        assert any(after[name] != before[name] for name in expert_biases(engine))


@pytest.mark.parametrize("precision", [{}, FP16], ids=["fp32", "fp16"])
def test_a_stop_leaves_the_state_before_the_iteration(poisoned: list[int], precision: dict[str, Any]) -> None:
    """Weights, moments, biases, random numbers, loss scale and learning rate are as before the iteration."""
    config = engines.micro_config({**EVERYTHING, **precision, "training.loss_spike_factor": 1.5})
    config.training.loss_spike_window, config.training.loss_spike_policy = 2, "stop"
    with engines.engine_of(config) as engine:
        for iteration in (1, 2):
            assert engine.run_iteration(iteration).decision.action == "commit"
        engine.expert_load()
        # Where the state is between two iterations: the learning rate of the next is set as it begins.
        engine.prepare(3)
        engine.abort()
        engine.expert_load()
        before = {**engines.digests(engine), **volatile_state(engine)}
        history = engine.history
        if precision:
            engine.history = type(history)(losses=(0.01, 0.01))
        else:
            poisoned.append(3)
        assert engine.run_iteration(3).decision.action == "stop"
        engine.expert_load()
        assert engine.iteration == 2
        assert {**engines.digests(engine), **volatile_state(engine)} == before
        poisoned.clear()
        engine.history = history
        again = engine.run_iteration(3)
        assert again.decision.action == "commit"
    with engines.engine_of(config) as engine:
        losses = [engine.run_iteration(iteration).vote.loss for iteration in (1, 2, 3)]
        assert losses[2] == again.vote.loss


def test_an_aborted_iteration_draws_no_number_of_any_generator() -> None:
    """Megatron and the samples do not use the generators of Python and numpy, but a transform of a user may."""
    import random

    import numpy as np

    with engines.engine_of(engines.micro_config(EVERYTHING)) as engine:
        engine.run_iteration(1)
        engine.stop_requested = lambda: random.random() + np.random.random() < 0
        before = engine.train_state()
        engine.prepare(2)
        assert "rng" in engine.train_state().differences(before)
        engine.abort()
        assert engine.train_state().differences(before) == []
        engine.abort()  # nothing is in progress
        assert engine.run_iteration(2).decision.action == "commit"


def test_evaluation_changes_nothing() -> None:
    with engines.engine_of(engines.micro_config(EVERYTHING)) as engine:
        engine.run_iteration(1)
        engine.run_iteration(2)
        before = {**engines.digests(engine), **volatile_state(engine)}
        first, second = engine.evaluate(), engine.evaluate()
        assert {**engines.digests(engine), **volatile_state(engine)} == before
        assert first == second
        assert all(chunk.training for chunk in engine.model_chunks)
        mixed = engine.run_iteration(3).vote
    with engines.engine_of(engines.micro_config(EVERYTHING)) as engine:
        assert [engine.run_iteration(iteration).vote for iteration in (1, 2, 3)][2].loss == mixed.loss


def test_a_rebuild_keeps_the_router_bias_to_the_bit() -> None:
    """A model that has not run has the bias in BF16, which cannot represent the bits of the first updates."""
    from megatron_ft.mcore.moe.router import _routers

    with engines.engine_of(engines.micro_config({**EVERYTHING, "precision.params_dtype": "bf16"})) as engine:
        engine.run_iteration(1)
        before = [router.expert_bias.clone() for router in _routers(engine.model_chunks)]
        engine.rebuild(None)
        after = [router.expert_bias for router in _routers(engine.model_chunks)]
        assert [bias.dtype for bias in after] == [torch.float32, torch.float32]
        assert all(bias.any() and torch.equal(bias, old) for bias, old in zip(after, before, strict=True))


def test_a_smaller_model_follows_a_larger_one() -> None:
    """The first model leaves nothing in the process that affects the second one, in either order."""
    losses = {}
    for num_layers in (2, 4, 2):
        with engines.engine_of(engines.micro_config({"model.num_layers": num_layers})) as engine:
            loss = engine.run_iteration(1).vote.loss
        assert losses.setdefault(num_layers, loss) == loss


def test_a_stop_request_travels_with_the_vote() -> None:
    with engines.engine_of(engines.micro_config()) as engine:
        assert not engine.run_iteration(1).vote.stop_requested
        engine.stop_requested = lambda: True
        result = engine.run_iteration(2)
        assert result.vote.stop_requested and result.decision.action == "commit"


def test_every_phase_is_reported_in_order() -> None:
    reported: list[tuple[int, str]] = []
    failpoints.watch(lambda iteration, phase: reported.append((iteration, phase)))
    try:
        with engines.engine_of(engines.micro_config({"training.global_batch_size": 2})) as engine:
            engine.run_iteration(1)
    finally:
        failpoints.watch(None)
    phases = [phase for iteration, phase in reported if iteration == 1]
    microbatch = ["forward", "dispatch", "backward"]
    later = ["grad_sync", "vote_before", "vote_inside", "vote_after", "update", "gather", "teardown"]
    assert phases == ["data", *microbatch * (len(phases[1 : -len(later)]) // 3), *later]
    assert phases.count("backward") >= 1 and reported[0] == (0, "build")


@pytest.mark.parametrize(("placement", "expected"), [(object(), True), (None, False)], ids=["replicas", "none"])
def test_loads_are_observed_whenever_there_are_replicas(placement: object, expected: bool) -> None:
    """Loads are observed also without rebalancing: the placement after a lost node is planned from them."""
    from megatron_ft.mcore.training.trainer import Trainer

    trainer = object.__new__(Trainer)
    config = engines.micro_config({"telemetry.expert_load_interval_iterations": 0})
    vars(trainer).update(config=config, placement=placement, snapshots=None)
    assert trainer._wants_load(3) is expected

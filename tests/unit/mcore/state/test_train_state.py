"""Tests that ``TrainState`` is captured, converted to JSON and restored without changes."""

import json

import pytest
import torch

from megatron_ft.errors import RecoveryError
from megatron_ft.testing import engines
from tests.helpers.volatile import volatile_state


def test_it_survives_json_and_names_what_is_missing() -> None:
    from megatron_ft.mcore.state.train_state import TrainState

    overrides = {
        "precision.params_dtype": "fp16",
        "precision.initial_loss_scale": 64.0,
        "precision.loss_scale_window": 1,
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
        "model.hidden_dropout": 0.1,
    }
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        engine.run_iteration(1)
        record = json.loads(json.dumps(engine.train_state().to_json()))
        expected, history = volatile_state(engine), engine.history
        engine.run_iteration(2)
        torch.manual_seed(0)
        scale = float(engine.optimizer.get_loss_scale())
        changed = {key for key, value in volatile_state(engine).items() if expected[key] != value}
        assert {"cpu_rng", "scalers"} <= changed and any("expert_bias" in key for key in changed)
        engine.restore(TrainState.from_json(record))
        now = volatile_state(engine)
        same = {key for key in now if now[key] == expected[key]}
        assert {key for key in now if "load." not in key and key != "learning_rates"} <= same
        assert (engine.iteration, engine.history) == (1, history)
        assert float(engine.optimizer.get_loss_scale()) != scale
        del record["buffers"][next(iter(record["buffers"]))]
        with pytest.raises(RecoveryError, match="different buffers"):
            engine.restore(TrainState.from_json(record))


def test_it_fits_an_engine_that_never_ran() -> None:
    """Before its first forward pass, Megatron has the router bias in BF16. The restored bias must not be rounded."""
    from megatron_ft.mcore.moe.router import _routers
    from megatron_ft.mcore.state.train_state import TrainState

    overrides = {
        "precision.params_dtype": "bf16",
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
    }
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        engine.run_iteration(1)
        record = json.loads(json.dumps(engine.train_state().to_json()))
        biases = [router.expert_bias.clone() for router in _routers(engine.model_chunks)]
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        assert all(router.expert_bias.dtype is torch.bfloat16 for router in _routers(engine.model_chunks))
        engine.restore(TrainState.from_json(record))
        for router, bias in zip(_routers(engine.model_chunks), biases, strict=True):
            assert bias.any() and torch.equal(router.expert_bias, bias)
            assert router.expert_bias.dtype is torch.float32


def test_the_first_record_on_disk_is_read() -> None:
    """Headers of stored slices have these names. Fields that were added later may be missing."""
    from megatron_ft.mcore.state.train_state import TrainState

    recorded = {
        "iteration": 3,
        "buffers": {"0.router.expert_bias": {"tensor_base64": "AACAPw==", "dtype": "float32", "shape": [1]}},
        "grad_scalers": [],
        "group_steps": [3, None],
        "history": {"losses": [2.5], "num_consecutive_skips": 1},
    }
    state = TrainState.from_json(recorded)
    assert torch.equal(state.buffers["0.router.expert_bias"], torch.ones(1))
    assert (state.iteration, state.rng, state.newest_vote, state.stopped) == (3, None, None, None)
    assert (state.history.losses, state.history.num_consecutive_skips) == ((2.5,), 1)
    assert state.to_json(own=False) == {**recorded, "rounded_off": 0}

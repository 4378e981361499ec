"""``TrainState``: captured, written as JSON, put back; nothing else changes it."""

import json

import pytest
import torch

from megatron_ft.errors import RecoveryError
from tests.helpers import engines


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
        expected, history = engines.volatile_state(engine), engine.history
        engine.run_iteration(2)
        torch.manual_seed(0)
        scale = float(engine.optimizer.get_loss_scale())
        changed = {key for key, value in engines.volatile_state(engine).items() if expected[key] != value}
        assert {"cpu_rng", "scalers"} <= changed and any("expert_bias" in key for key in changed)
        engine.restore(TrainState.from_json(record))
        now = engines.volatile_state(engine)
        same = {key for key in now if now[key] == expected[key]}
        assert {key for key in now if "load." not in key and key != "learning_rates"} <= same
        assert (engine.iteration, engine.history) == (1, history)
        assert float(engine.optimizer.get_loss_scale()) != scale
        del record["buffers"][next(iter(record["buffers"]))]
        with pytest.raises(RecoveryError, match="buffers differ"):
            engine.restore(TrainState.from_json(record))


def test_it_fits_an_engine_that_never_ran() -> None:
    """Until the first forward Megatron has the router bias in BF16: it must not round what is put back."""
    from megatron_ft.mcore.moe.observation import routers
    from megatron_ft.mcore.state.train_state import TrainState

    overrides = {
        "precision.params_dtype": "bf16",
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
    }
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        engine.run_iteration(1)
        record = json.loads(json.dumps(engine.train_state().to_json()))
        biases = [router.expert_bias.clone() for router in routers(engine.model_chunks)]
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        assert all(router.expert_bias.dtype is torch.bfloat16 for router in routers(engine.model_chunks))
        engine.restore(TrainState.from_json(record))
        for router, bias in zip(routers(engine.model_chunks), biases, strict=True):
            assert bias.any() and torch.equal(router.expert_bias, bias)
            assert router.expert_bias.dtype is torch.float32

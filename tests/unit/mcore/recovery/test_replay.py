"""Tests frozen operators: they compute outputs and input gradients but no weight gradients, and are unchanged
afterwards."""

from typing import Any

import pytest
import torch

from megatron_ft.testing import engines

pytestmark = pytest.mark.slow  # trains

OVERLAP = {"parallel.overlap_grad_reduce": True}


def gradients(engine: Any, frozen_names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the reduced gradients of iteration 1 by name, with the named parameters frozen."""
    from megatron_ft.mcore.model.transformer_config import named_parameters
    from megatron_ft.mcore.snapshot.local_window import frozen, synchronous_reduction

    config = engine.transformer_config
    named = [pair for chunk in engine.model_chunks for pair in named_parameters(chunk)]
    chosen = {parameter for name, parameter in named if name.startswith(frozen_names)} if frozen_names else set()
    rng = torch.get_rng_state()
    finalize = config.finalize_model_grads_func
    with synchronous_reduction(engine.model_chunks, config), frozen(engine.model_chunks, chosen) as thaw:
        assert not any(parameter.requires_grad for parameter in chosen)
        config.finalize_model_grads_func = lambda *args, **kwargs: (thaw(), finalize(*args, **kwargs))
        engine.accumulate(1)
    config.finalize_model_grads_func = finalize
    torch.set_rng_state(rng)
    assert all(parameter.requires_grad for _, parameter in named)
    assert all(chunk.ddp_config.overlap_grad_reduce for chunk in engine.model_chunks)
    return {name: parameter.main_grad.clone() for name, parameter in named}


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize(
    "names",
    [
        ("embedding.",),
        ("embedding.", "decoder.layers.0."),
        ("output_layer.", "decoder.final_layernorm."),
        ("decoder.layers.1.mlp.experts.local_experts.2.", "decoder.layers.0.mlp.router."),
    ],
    ids=["embedding", "bottom", "head", "expert_and_gate"],
)
def test_others_get_the_same_gradients(names: tuple[str, ...], recompute: bool) -> None:
    overrides = {**OVERLAP, **({"training.recompute_granularity": "full"} if recompute else {})}
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        whole, without = gradients(engine, ()), gradients(engine, names)
        for name, gradient in whole.items():
            if name.startswith(names):
                assert not without[name].any(), name
            else:
                assert torch.equal(gradient, without[name]), name
        assert sum(gradient.any().item() for gradient in without.values()) > 10


def test_training_goes_on_with_overlapped_reduction() -> None:
    """The synchronous reduction of a replay must leave no state in the gradient buckets."""
    config = engines.micro_config(OVERLAP)
    with engines.engine_of(config) as engine:
        expected = [engine.run_iteration(number).vote.loss for number in (1, 2, 3)]
    with engines.engine_of(config) as engine:
        gradients(engine, ("embedding.",))
        assert [engine.run_iteration(number).vote.loss for number in (1, 2, 3)] == expected

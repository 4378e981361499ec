"""Tests that frozen parameters keep their bits, and that the others are trained (``training.frozen``)."""

from typing import Any

import pytest
import torch

from megatron_ft.mcore.optimizer import adamw
from megatron_ft.mcore.optimizer.adamw import masters
from megatron_ft.testing import engines

pytestmark = pytest.mark.slow  # trains

NUM_ITERATIONS = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "distributed optimizer, bf16": {"precision.params_dtype": "bf16"},
    "plain optimizer, fp32": {"parallel.use_distributed_optimizer": False},
    "plain optimizer, fp16": {
        "parallel.use_distributed_optimizer": False,
        "precision.params_dtype": "fp16",
        "precision.initial_loss_scale": 256.0,
    },
}


def bits(engine: Any) -> dict[str, torch.Tensor]:
    """Return compute weights, master weights and moments by name."""
    found = {m.name: m for m in masters(engine.model_chunks, engine.optimizer)}
    state = {f"{name}.{key}": m.state[key].clone() for name, m in found.items() for key in adamw.MOMENTS}
    weights = {name: p.detach().clone() for name, p in engine.model_chunks[0].named_parameters()}
    return {**state, **weights, **{f"{name}.master": m.tensor.detach().clone() for name, m in found.items()}}


@pytest.mark.parametrize("frozen", ["experts", "others"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_frozen_parameters_keep_their_bits(variant: str, frozen: str) -> None:
    config = engines.micro_config(
        {
            **VARIANTS[variant],
            "training.frozen": frozen,
            "optimizer.weight_decay": 0.5,
            "optimizer.lr_warmup_init": 0.01,
        }
    )
    with engines.engine_of(config) as engine:
        before = bits(engine)
        votes = [engine.run_iteration(iteration).vote for iteration in range(1, NUM_ITERATIONS + 1)]
        after = bits(engine)
        assert adamw.step_count(engine.optimizer) == NUM_ITERATIONS
        same = {name for name in before if torch.equal(before[name], after[name])}
        assert same == {name for name in before if (".experts." in name) == (frozen == "experts")}
        # The gradients of frozen parameters do not count in the norm by which the others are clipped.
        grads = [m.tensor.grad for m in masters(engine.model_chunks, engine.optimizer)]
        assert sum(grad is None for grad in grads) == sum(name.endswith(".master") for name in same)
        assert votes[0].grad_norm > 0
    whole = engines.micro_config({**VARIANTS[variant], "optimizer.lr_warmup_init": 0.01})
    with engines.engine_of(whole) as engine:
        assert engine.run_iteration(1).vote.grad_norm > votes[0].grad_norm

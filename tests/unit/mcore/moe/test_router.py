"""Tests that padding microbatches have no effect, and that each routed token is counted once."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_ft.testing import engines

pytestmark = pytest.mark.slow  # trains

KINDS: dict[str, dict[str, Any]] = {
    "aux_loss": {"model.moe_router_load_balancing_type": "aux_loss"},
    "seq_aux_loss": {"model.moe_router_load_balancing_type": "seq_aux_loss"},
    "expert_bias": {"model.moe_router_score_function": "sigmoid", "model.moe_router_enable_expert_bias": True},
    "full_recompute": {
        "training.recompute_granularity": "full",
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
    },
    "sinkhorn": {"model.moe_router_load_balancing_type": "sinkhorn", "model.moe_aux_loss_coeff": 0.0},
    "bf16": {"precision.params_dtype": "bf16"},
}
LARGE = {"model.moe_aux_loss_coeff": 10.0, "model.moe_z_loss_coeff": 10.0}


def observed(overrides: dict[str, Any], padding: int) -> dict[str, Any]:
    """Run one iteration with ``padding`` padding microbatches after the four real ones."""
    with engines.engine_of(engines.micro_config({**LARGE, **overrides})) as engine:
        engines.add_padding(engine, 4 + padding)
        assert engine.batch.num_padding_microbatches == padding
        vote = dataclasses.replace(engine.run_iteration(1).vote, generation=0)
        load = engine.expert_load()
        return {"vote": vote, "load": load.tolist(), "state": engines.digests(engine)}


@pytest.mark.parametrize("kind", KINDS)
def test_padding_leaves_no_trace(kind: str) -> None:
    """Losses, norm, counts and biases have the same bits as without padding, and are not zero."""
    without, with_padding = observed(KINDS[kind], 0), observed(KINDS[kind], 3)
    assert with_padding["vote"] == without["vote"]
    assert with_padding["load"] == without["load"]
    assert with_padding["state"] == without["state"]
    assert without["vote"].z_loss > 0
    assert sum(map(sum, without["load"])) == 2 * 2 * 4 * 16


@pytest.mark.parametrize("kind", KINDS)
def test_padding_alone_has_no_gradient(kind: str) -> None:
    """Every gradient is exactly zero if all microbatches are padding, with and without auxiliary losses."""
    with engines.engine_of(engines.micro_config({**LARGE, **KINDS[kind]})) as engine:

        class Padding(type(engine.batch)):  # type: ignore[misc]
            __slots__ = ()

            def first_sample(self, *_: int) -> None:
                return None

        engine.batch = Padding(**dataclasses.asdict(engine.batch))
        ballot = engine.prepare(1)
        gradients = [parameter.main_grad for chunk in engine.model_chunks for parameter in chunk.parameters()]
        assert len(gradients) > 10
        assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients)
        assert (ballot.num_tokens, ballot.loss_sum, ballot.aux_loss_sum, ballot.z_loss_sum) == (0, 0.0, 0.0, 0.0)
        assert not engine.expert_load().any()


@pytest.mark.parametrize("recompute", [None, "full"])
def test_load_is_what_was_routed(recompute: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full recomputation routes every token twice but counts it once."""
    from megatron.core.transformer.moe.router import TopKRouter

    routed: dict[int, torch.Tensor] = {}
    calls = []
    original = TopKRouter.routing

    def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = original(self, *args, **kwargs)
        calls.append(torch.is_grad_enabled())
        if torch.is_grad_enabled():
            routed[self.layer_number] = routed.get(self.layer_number, 0) + routing_map.sum(dim=0)
        return probs, routing_map

    monkeypatch.setattr(TopKRouter, "routing", routing)
    overrides = {"model.moe_expert_capacity_factor": 0.5, "training.recompute_granularity": recompute}
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        engine.run_iteration(1)
        engine.evaluate()
        load = engine.expert_load()
        assert torch.equal(engine.expert_load(), load), "an evaluation is not counted, and reading changes nothing"
    assert load.dtype == torch.int64
    assert load.tolist() == [routed[1].tolist(), routed[2].tolist()]
    assert 0 < load.sum() < 2 * 2 * 4 * 16, "the capacity drops some"
    assert calls.count(True) == 2 * 4

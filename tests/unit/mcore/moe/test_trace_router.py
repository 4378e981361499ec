"""Tests routing by recorded loads in the engine: loads equal the record, the gate is trained, and repetitions are
exact."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.planning.trace import expert_token_counts
from megatron_ft.testing import engines

pytestmark = pytest.mark.slow  # trains

LOADS = [[9, 4, 2, 1], [1, 1, 1, 3]]
NUM_TOKENS = 16
KINDS: dict[str, dict[str, Any]] = {
    "post_softmax": {},
    "pre_softmax": {"model.moe_router_pre_softmax": True},
    "sigmoid": {"model.moe_router_score_function": "sigmoid"},
    "scaled": {"model.moe_router_topk_scaling_factor": 2.5},
    "full_recompute": {"training.recompute_granularity": "full"},
    "top1": {"model.moe_router_topk": 1, "model.moe_router_pre_softmax": True},
}


@pytest.fixture
def trace(tmp_path: Path) -> dict[str, Any]:
    """Return overrides that force ``LOADS``."""
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(LOADS))
    return {"model.router": "trace", "model.router_trace_file": str(path)}


def routed(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, Any, Any]]:
    """Return (layer, whether gradients are computed, map, probabilities) of every router call in iteration 2."""
    from megatron_ft.mcore.moe.router import _TraceRouter

    calls = []
    original = _TraceRouter.routing

    def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = original(self, *args, **kwargs)
        calls.append((self.layer_number, torch.is_grad_enabled(), routing_map, probs.detach()))
        return probs, routing_map

    with engines.engine_of(engines.micro_config(overrides)) as engine:
        engine.run_iteration(1)
        monkeypatch.setattr(_TraceRouter, "routing", routing)
        engine.run_iteration(2)
        monkeypatch.setattr(_TraceRouter, "routing", original)
        for chunk in engine.model_chunks:
            for name, parameter in chunk.named_parameters():
                assert "router" not in name or parameter.main_grad.any(), f"{name} has no gradient"
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_every_microbatch_follows_the_record(kind: str, trace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {**trace, **KINDS[kind]}
    topk = overrides.get("model.moe_router_topk", 2)
    calls = routed(overrides, monkeypatch)
    assert len([call for call in calls if call[1]]) == 2 * 4
    for layer, _, routing_map, probs in calls:
        assert routing_map.sum(dim=0).tolist() == expert_token_counts(LOADS[layer - 1], NUM_TOKENS, topk)
        assert (routing_map.sum(dim=1) == topk).all()
        assert torch.equal(probs > 0, routing_map)
        if kind == "scaled":
            assert torch.allclose(probs.sum(dim=1), torch.tensor(2.5))


def test_recomputation_routes_the_same_again(trace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = routed({**trace, **KINDS["full_recompute"]}, monkeypatch)
    for layer in (1, 2):
        first = [call[2] for call in calls if call[:2] == (layer, False)]
        again = [call[2] for call in calls if call[:2] == (layer, True)]
        assert len(first) == len(again) == 4
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        assert not torch.equal(first[0], first[1]), "microbatches differ"


def test_the_same_job_routes_the_same_and_another_seed_does_not(
    trace: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other = (
        [call[2] for call in routed({**trace, "training.seed": seed}, monkeypatch)] for seed in (1, 1, 2)
    )
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_loads_of_the_job_are_those_of_the_record(trace: dict[str, Any]) -> None:
    """Checks an iteration and an evaluation. Padding microbatches are routed but not counted."""
    with engines.engine_of(engines.micro_config(trace)) as engine:
        engines.add_padding(engine, 6)
        engine.run_iteration(1)
        engine.evaluate()
        load = engine.expert_load().tolist()
    assert load == [[4 * count for count in expert_token_counts(loads, NUM_TOKENS, 2)] for loads in LOADS]

"""Tests which layers have FP8 operands, and that an FP8 job trains and reports the products that it cannot do."""

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_ft.config.model import PrecisionConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.model.fp8_layers import _Fp8Product, use_fp8
from megatron_ft.mcore.model.transformer_config import unwrap
from megatron_ft.testing import engines
from transformer_engine_ext.formats import E4M3, E5M2
from transformer_engine_ext.providers import TorchProvider
from transformer_engine_ext.recipes import AMAX_HISTORY, DelayedScaler

SHARED: dict[str, Any] = {"model.moe_shared_expert_intermediate_size": 64, "model.moe_first_dense_layers": 1}


def fp8(recipe: str, **more: Any) -> dict[str, Any]:
    return {"precision.params_dtype": "bf16", "precision.fp8": "hybrid", "precision.fp8_recipe": recipe, **more}


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_attention_mlp_and_experts_compute_with_fp8(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    formats: Counter[tuple[str, str]] = Counter()
    product = TorchProvider.product

    def watched(self: Any, left: Any, right: Any, *others: Any, **more: Any) -> torch.Tensor:
        formats[left.format.name, right.format.name] += 1
        return product(self, left, right, *others, **more)

    monkeypatch.setattr(TorchProvider, "product", watched)
    with engines.engine_of(engines.micro_config({**fp8(recipe), **SHARED})) as engine:
        model = unwrap(engine.model_chunks[0])
        names = {name.split("layers.")[1] for name, found in model.named_modules() if isinstance(found, _Fp8Product)}
        vote = engine.run_iteration(1).vote
    attention = {f"{layer}.self_attention.linear_{name}" for layer in (0, 1) for name in ("qkv", "proj")}
    experts = {f"experts.local_experts.{number}" for number in range(4)} | {"shared_experts"}
    mlps = {"0.mlp", *(f"1.mlp.{name}" for name in experts)}
    assert names == attention | {f"{name}.linear_fc{number}" for name in mlps for number in (1, 2)}
    assert vote.grad_norm > 0
    # A layer has one product with E4M3 inputs, and two with gradients in E5M2, also if an expert has no tokens.
    num_microbatches = 4
    assert formats.keys() == {(E4M3.name, E4M3.name), (E5M2.name, E4M3.name)}
    num_forward, num_backward = formats[E4M3.name, E4M3.name], formats[E5M2.name, E4M3.name]
    assert num_forward == num_microbatches * len(names)
    assert num_backward == num_forward * 2


def test_results_are_near_bf16_but_are_not_those_of_bf16() -> None:
    losses = {}
    for name, overrides in {
        "bf16": {"precision.params_dtype": "bf16"},
        "tensorwise": fp8("tensorwise"),
        "blockwise": fp8("blockwise"),
        "e4m3": {**fp8("blockwise"), "precision.fp8": "e4m3"},
        "delayed": fp8("delayed"),
    }.items():
        with engines.engine_of(engines.micro_config(overrides)) as engine:
            votes = [engine.run_iteration(number).vote for number in (1, 2, 3)]
        losses[name] = [value for vote in votes for value in (vote.loss, vote.grad_norm)]
    # Scales are powers of two, so both recipes give the same codes if no value underflows, as in this small model.
    assert losses["tensorwise"] == losses["blockwise"]
    assert len({tuple(found) for found in losses.values()}) == 4
    for found in losses.values():
        assert found == pytest.approx(losses["bf16"], rel=0.05)


def test_delayed_scaling_uses_the_magnitudes_of_committed_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[torch.Tensor] = []
    quantize = DelayedScaler.quantize

    def watched(self: DelayedScaler, values: torch.Tensor) -> Any:
        if self.target is E5M2 and is_watching and values.numel():
            rows.append(values.detach().float().abs().max())
        return quantize(self, values)

    monkeypatch.setattr(DelayedScaler, "quantize", watched)
    is_watching = False
    overrides = {**fp8("delayed"), **SHARED, "precision.fp8_amax_history_length": 2}
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        layers = unwrap(engine.model_chunks[0]).decoder.layers
        histories = [getattr(layer, AMAX_HISTORY) for layer in layers]
        # Layer 1 has a dense MLP. Layer 2 has four experts, of which each has two linear layers, and a shared one.
        assert [found.shape for found in histories] == [(2, 4, 3), (2, 4 + 8, 3)]
        assert all(found.dtype is torch.float32 and not found.any() for found in histories)
        engine.run_iteration(1)
        first = [found.clone() for found in histories]
        assert all(found[0].gt(0).all() and not found[1].any() for found in first)
        is_watching = True
        engine.run_iteration(2)
        assert all(found[1].equal(before[0]) for found, before in zip(histories, first, strict=True))
        # Gradients of all microbatches: the largest is that of some layer.
        assert max(rows) == max(found[0, :, 2].max() for found in histories)
        kept = [found.clone() for found in histories]
        engine.evaluate()
        engine.prepare(3)
        engine.abort()
        assert all(found.equal(before) for found, before in zip(histories, kept, strict=True))


def test_recomputed_activations_do_not_change_the_history() -> None:
    found = {}
    for name, overrides in {"plain": {}, "recomputed": {"training.recompute_granularity": "full"}}.items():
        with engines.engine_of(engines.micro_config({**fp8("delayed"), **overrides})) as engine:
            votes = [engine.run_iteration(number).vote for number in (1, 2, 3)]
            layers = unwrap(engine.model_chunks[0]).decoder.layers
            found[name] = [*(vote.loss for vote in votes), *(getattr(layer, AMAX_HISTORY).clone() for layer in layers)]
    assert found["plain"][:3] == found["recomputed"][:3]
    assert all(one.equal(other) for one, other in zip(found["plain"][3:], found["recomputed"][3:], strict=True))


def test_a_product_that_torch_lacks_is_refused_by_key() -> None:
    precision = PrecisionConfig(fp8="hybrid", fp8_recipe="mxfp8")
    with pytest.raises(ConfigError, match=r"^precision\.fp8_recipe=mxfp8: is not supported: recipe=mxfp8"):
        use_fp8(None, precision, torch.device("cpu"))

"""Tests initial weights by kind of parameter. ``tests/distributed/test_engine.py`` compares layouts."""

import math

import pytest
import torch

from megatron_ft.testing import engines


def test_initial_weights_by_kind() -> None:
    from megatron_ft.mcore.model.transformer_config import named_parameters

    overrides = {
        "model.num_layers": 8,
        "model.num_moe_experts": None,
        "model.moe_ffn_hidden_size": None,
        "model.add_bias_linear": True,
        "model.normalization": "LayerNorm",
        "model.position_embedding_type": "learned_absolute",
        "model.qk_layernorm": True,
        "model.init_method_std": 0.5,
    }
    stds: dict[str, list[torch.Tensor]] = {"plain": [], "residual": []}
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        for name, parameter in named_parameters(engine.model_chunks[0]):
            if name.endswith("bias"):
                assert not parameter.any(), name
            elif "norm" in name:
                assert torch.equal(parameter, torch.ones_like(parameter)), name
            else:
                kind = "residual" if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else "plain"
                stds[kind].append(parameter.detach().flatten())
    assert len(stds["residual"]) == 16
    assert float(torch.cat(stds["plain"]).std()) == pytest.approx(0.5, rel=0.02)
    assert float(torch.cat(stds["residual"]).std()) == pytest.approx(0.5 / math.sqrt(16), rel=0.02)
    assert float(torch.cat(stds["plain"]).mean()) == pytest.approx(0.0, abs=0.02)


def test_no_two_matrices_are_the_same() -> None:
    from megatron_ft.mcore.model.transformer_config import named_parameters

    with engines.engine_of(engines.micro_config({"model.moe_shared_expert_intermediate_size": 64})) as engine:
        named = list(named_parameters(engine.model_chunks[0]))
    assert len({name for name, _ in named}) == len(named)
    matrices = [parameter.flatten()[:32].tolist() for name, parameter in named if "norm" not in name]
    assert len({tuple(values) for values in matrices}) == len(matrices)

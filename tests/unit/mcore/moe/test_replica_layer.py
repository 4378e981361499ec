"""Tests that the layer with replica slots computes the same as Megatron's layer, for any configuration of experts."""

from typing import Any

import pytest
import torch

from megatron_ft.mcore.moe.replica_layer import _replica_matrix, holders
from megatron_ft.testing import engines
from tests.helpers import mixtures

SLOTS = ((0, 1, 1, 2, 3, 3),)
"""Slots of the only rank, with uneven numbers of copies."""

VARIANTS: dict[str, dict[str, Any]] = {
    "top_two": {},
    "top_one": {"model.moe_router_topk": 1, "model.moe_router_pre_softmax": True},
    "top_three_sigmoid": {
        "model.moe_router_topk": 3,
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
    },
    "shared_experts": {"model.moe_shared_expert_intermediate_size": 32},
    "shared_experts_gated": {
        "model.moe_shared_expert_intermediate_size": 32,
        "model.moe_shared_expert_gate": True,
    },
    "capacity": {"model.moe_expert_capacity_factor": 0.5},
    "capacity_by_position": {"model.moe_expert_capacity_factor": 0.5, "model.moe_token_drop_policy": "position"},
    "capacity_padded": {
        "model.moe_expert_capacity_factor": 1.0,
        "model.moe_pad_expert_input_to_capacity": True,
    },
    "gelu": {"model.activation": "gelu", "model.gated_linear_unit": False},
    "seq_aux_loss": {"model.moe_router_load_balancing_type": "seq_aux_loss", "model.moe_aux_loss_coeff": 1.0},
    "recompute_layer": {"training.recompute_granularity": "selective"},
}


def both(
    overrides: dict[str, Any], backend: str = "reference", scale: float = 1.0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of Megatron's layer and of this project's layer for the same tokens: two sequences of 16."""
    config = engines.micro_config(overrides)
    dtype = torch.bfloat16 if config.precision.params_dtype == "bf16" else torch.float32
    with engines.groups_of(config) as groups:
        theirs, ours = mixtures.pair(config, groups.pg_collection, SLOTS, backend)
        tokens, grad = (torch.randn((16, 2, 32), generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        return tuple(mixtures.run(layer, tokens.to(dtype), grad.to(dtype) * scale) for layer in (theirs, ours))


def distance(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_computes_what_megatron_computes(variant: str, backend: str) -> None:
    theirs, ours = both(VARIANTS[variant], backend)
    assert theirs.keys() == ours.keys() and len(ours) > 10
    for name, expected in theirs.items():
        assert expected.abs().max() > 0, name
        assert distance(ours[name], expected) < 2e-6, name


def test_in_bf16_the_sum_is_closer_to_the_truth_than_rounding() -> None:
    """Probabilities weight outputs and not inner activations, so the rounding differs, within the precision of the
    type."""
    exact, _ = both({})
    theirs, ours = both({"precision.params_dtype": "bf16"})
    for name in ("output", "tokens"):
        assert distance(ours[name], theirs[name]) < 2e-2, name
        assert distance(ours[name], exact[name]) < 1.2 * distance(theirs[name], exact[name]), name


def test_gradients_scale_with_the_loss() -> None:
    """Loss scaling by a power of two changes no mantissa, also in the dispatch."""
    _, once = both({"model.moe_router_load_balancing_type": "none", "model.moe_z_loss_coeff": None})
    _, scaled = both({"model.moe_router_load_balancing_type": "none", "model.moe_z_loss_coeff": None}, scale=1024.0)
    for name in once.keys() - {"output"}:
        assert torch.equal(scaled[name], once[name] * 1024.0), name


def test_copies_on_a_rank_are_one_set_of_weights() -> None:
    config = engines.micro_config()
    with engines.groups_of(config) as groups:
        _, ours = mixtures.pair(config, groups.pg_collection, SLOTS)
        assert ours.local_expert_indices == ours.experts.expert_ids == [0, 1, 2, 3]
        assert len(ours.experts.local_experts) == 4
        assert ours.token_dispatcher.replicas.tolist() == [[1], [2], [1], [2]]


def test_slots_as_a_matrix() -> None:
    slots = ((0, 0, 2), (2, 1, 2))
    assert _replica_matrix(slots, 4).tolist() == [[2, 0], [0, 1], [1, 2], [0, 0]]
    assert [holders(slots, expert) for expert in range(4)] == [[0], [1], [0, 1], []]

"""Tests global names: the name of a tensor does not depend on the rank that has it."""

import pytest

CASES = [
    ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.4.self_attention.linear_qkv.weight"),
    ("decoder.layers.11.mlp.router.weight", "decoder.layers.15.mlp.router.weight"),
    (
        "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
        "decoder.layers.5.mlp.experts.local_experts.8.linear_fc1.weight",
    ),
    (
        "decoder.layers.1.mlp.experts.linear_fc1.weight3",
        "decoder.layers.5.mlp.experts.local_experts.9.linear_fc1.weight",
    ),
    (
        "decoder.layers.12.mlp.experts.linear_fc2.bias10",
        "decoder.layers.16.mlp.experts.local_experts.3.linear_fc2.bias",
    ),
    ("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", "decoder.layers.5.mlp.shared_experts.linear_fc1.weight"),
    ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
]


@pytest.mark.parametrize(("local", "expected"), CASES)
def test_layers_and_experts_count_over_the_whole_model(local: str, expected: str) -> None:
    from megatron_ft.mcore.model.transformer_config import _global_name

    expert_ids = {1: range(6, 12), 12: [9, 1, 8, 2, 7, 5, 6, 4, 0, 10, 3], 11: []}
    assert _global_name(local, layer_offset=4, expert_ids=expert_ids) == expected


@pytest.mark.parametrize(("local", "_"), CASES)
def test_both_forms_of_an_expert_share_a_name(local: str, _: str) -> None:
    """A global name stays unchanged, and grouped weights get the name of single ones."""
    from megatron_ft.mcore.model.transformer_config import _global_name

    whole = dict.fromkeys(range(20), range(20))
    once = _global_name(local, layer_offset=0, expert_ids=whole)
    assert _global_name(once, layer_offset=0, expert_ids=whole) == once
    assert not once[-1].isdigit()

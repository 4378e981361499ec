"""Tests the count of floating-point operations against torch's counter of an iteration."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron_ft.mcore.training.reporting import TokenFlops
from megatron_ft.testing import engines

LATENT = {
    "model.multi_latent_attention": True,
    "model.kv_lora_rank": 24,
    "model.qk_head_dim": 12,
    "model.qk_pos_emb_head_dim": 8,
    "model.v_head_dim": 20,
}
MODELS = {
    "default": {},
    "grouped queries, wide heads": {"model.num_query_groups": 2, "model.kv_channels": 24},
    "dense": {"model.num_moe_experts": None, "model.moe_ffn_hidden_size": None, "model.gated_linear_unit": False},
    "every second layer, top-3": {"model.num_layers": 4, "model.moe_layer_freq": 2, "model.moe_router_topk": 3},
    "shared experts with a gate": {
        "model.num_layers": 3,
        "model.moe_first_dense_layers": 1,
        "model.moe_shared_expert_intermediate_size": 40,
        "model.moe_shared_expert_gate": True,
    },
    "latent attention": LATENT,
    "latent attention, low-rank queries": LATENT | {"model.q_lora_rank": 28},
    "tied head": {"model.untie_embeddings_and_output_weights": False},
}


@pytest.mark.parametrize("name", MODELS)
def test_torch_counts_the_same_products(name: str) -> None:
    """Layers of the local spec compute the whole square of attention scores, so their products count twice."""
    config = engines.micro_config(MODELS[name])
    with engines.engine_of(config) as engine, FlopCounterMode(display=False) as counter:
        engine.accumulate(1)
        vocab_size = engine.vocab_size
    found = TokenFlops.of(config.model, vocab_size)
    num_tokens = config.training.global_batch_size * config.model.seq_length
    assert counter.get_total_flops() == num_tokens * (found.total + found.scores)

"""Multi-head latent attention (DeepSeek) with Megatron's local layers, on any device.

Without Transformer Engine, such a layer of Megatron-Core 0.16.1 does not work: its core attention has no parameter for
the width of heads, and needs values and queries of equal width. With tensor parallelism, Megatron also splits the down
projections, but does not sum the gradient of the rotated part of the keys over the ranks, so this gradient is wrong.
Here every tensor-parallel rank has the whole down projections, as with Transformer Engine.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_ft.mcore.versions import submodules_of

# Without Transformer Engine, Megatron imports placeholders for its classes, and still sets ``HAVE_TE`` to true.
multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE

_KEY_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Prefix of parameter names in a ``local`` layer -> prefix in checkpoints, which use Transformer Engine's names."""


class _LatentDotProductAttention(DotProductAttention):
    """Attention in which heads of values may have another width than heads of queries and keys."""

    def __init__(
        self, *, config: TransformerConfig, k_channels: int = 0, v_channels: int = 0, cp_comm_type: Any, **named: Any
    ) -> None:
        super().__init__(config=config, **named)
        # The widths have defaults, because Megatron first makes an instance without widths, and then replaces it.
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class _WholeLinear(torch.nn.Module):
    """Linear layer that is not split: every tensor-parallel rank has the whole weight. With sequence parallelism, each
    rank applies the layer to its part of the sequence, and Megatron sums the gradients of the ranks."""

    def __init__(self, config: TransformerConfig, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_outputs, num_inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the outputs, and None instead of a bias, like Megatron's layers. ``inputs`` is [..., num_inputs]."""
        return functional.linear(inputs, self.weight), None


class LatentAttention(MLASelfAttention):
    """Latent attention in which every tensor-parallel rank has the whole down projections."""

    config: MLATransformerConfig

    def __init__(self, config: MLATransformerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        hidden = config.hidden_size
        self.linear_kv_down_proj = _WholeLinear(config, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _WholeLinear(config, hidden, config.q_lora_rank)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        # From 0.19, Megatron calls this method. Without Transformer Engine, Megatron's version refuses a norm of keys
        # and values if queries have no norm. Here queries have none if ``q_lora_rank`` is None.
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def use_latent_attention(submodules: Any) -> None:
    """Put the attention classes of this module into the spec of a layer that has Megatron's latent attention."""
    attention: ModuleSpec = submodules.self_attention
    attention.module = LatentAttention
    attention.submodules.core_attention = _LatentDotProductAttention
    names = dict(_KEY_NAMES)
    if not isinstance(submodules_of(submodules.mlp), MoESubmodules):
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    submodules.sharded_state_dict_keys_map = {**submodules.sharded_state_dict_keys_map, **names}

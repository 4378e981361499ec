"""Megatron's layer specs with the project's norm, router and MoE layer."""

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules, RouterBuilder
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_ft.mcore.model.norm import SequenceParallelNorm
from megatron_ft.mcore.moe.layer import MixtureLayer
from megatron_ft.mcore.moe.replica_layer import ReplicaMixtureLayer
from megatron_ft.mcore.moe.replicas import Replicas


def build_block_spec(
    config: TransformerConfig,
    transformer_impl: str,
    *,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    replicas: Replicas | None,
    router: RouterBuilder,
) -> TransformerBlockSubmodules:
    """Return the layer specs of one model chunk of this rank: virtual pipeline stage ``vp_stage``, or None. Without
    ``replicas``, MoE layers assign experts to ranks as Megatron does. ``router`` creates their routers."""
    local = transformer_impl == "local"
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=not local,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pg_collection.pp.rank(),
    )
    # Megatron uses one spec object for all layers. Layers differ in their experts, so each needs its own object.
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pg_collection.pp.rank())
    for layer_number, layer in enumerate(block.layer_specs, offset + 1):
        if local:
            _use_own_norms(layer.submodules)
        if isinstance(layer.submodules.mlp.submodules, MoESubmodules):
            layer.submodules.mlp.submodules.router = router
            _use_own_mixture(layer.submodules.mlp, layer_number, pg_collection, replicas)
    if local:
        block.layer_norm = SequenceParallelNorm
    return block


def _use_own_norms(submodules: Any) -> None:
    attention = submodules.self_attention.submodules
    for owner, name in (
        (submodules, "input_layernorm"),
        (submodules, "pre_mlp_layernorm"),
        (attention, "q_layernorm"),
        (attention, "k_layernorm"),
        (attention, "kv_layernorm"),
    ):
        if getattr(owner, name, None) not in (None, IdentityOp):
            setattr(owner, name, SequenceParallelNorm)


def _use_own_mixture(
    mlp: Any, layer_number: int, pg_collection: ProcessGroupCollection, replicas: Replicas | None
) -> None:
    # Megatron passes process groups only to its own ``MoELayer`` class, so the spec passes them to the subclass.
    mlp.params = {"pg_collection": pg_collection}
    if replicas is None:
        mlp.module = MixtureLayer
    else:
        mlp.module = ReplicaMixtureLayer
        mlp.params |= {"slots": replicas.slots_of(layer_number), "backend": replicas.backend}

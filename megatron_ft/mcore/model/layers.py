"""Layer specs of the model: Megatron's, with the project's norm and router."""

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
    """Return the layer specs of one model chunk: this rank's pipeline stage, virtual chunk ``vp_stage``. ``router``
    makes routers."""
    local = transformer_impl == "local"
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=not local,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pg_collection.pp.rank(),
    )
    # Megatron gives all layers one spec; layers differ in their experts, so each gets its own.
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
    # Megatron passes its groups to its own MoELayer only; a subclass would have to read globals.
    mlp.params = {"pg_collection": pg_collection}
    if replicas is None:
        mlp.module = MixtureLayer
    else:
        mlp.module = ReplicaMixtureLayer
        mlp.params |= {"slots": replicas.slots_of(layer_number), "backend": replicas.backend}

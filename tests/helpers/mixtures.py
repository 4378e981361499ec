"""Builds one MoE layer twice with the same weights: Megatron's layer, and the layer with replica slots."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.config.job import JobConfig
from megatron_ft.mcore import versions
from megatron_ft.mcore.model.transformer_config import build_transformer_config
from megatron_ft.mcore.moe.replica_layer import ReplicaMixtureLayer
from megatron_ft.mcore.moe.router import PaddingAwareRouter
from megatron_ft.runtime.dispatch.backend import open_backend


def submodules_of(config: TransformerConfig) -> MoESubmodules:
    """Return Megatron's submodules of an MoE layer, with the project's router."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    return replace(versions.submodules_of(block.layer_specs[-1].submodules.mlp), router=PaddingAwareRouter)


def pair(
    job: JobConfig, pg_collection: ProcessGroupCollection, slots: Sequence[Sequence[int]], backend: str = "reference"
) -> tuple[MoELayer, ReplicaMixtureLayer]:
    """Return (Megatron's layer, this project's layer for ``slots``) on one rank, with equal random weights."""
    config = build_transformer_config(job, "local")
    torch.manual_seed(5)
    theirs = MoELayer(config, submodules_of(config), layer_number=1, pg_collection=pg_collection)
    ours = ReplicaMixtureLayer(
        config,
        submodules_of(config),
        layer_number=1,
        slots=slots,
        backend=open_backend(backend),
        pg_collection=pg_collection,
    )
    for layer in (theirs, ours):
        layer.set_layer_number(1)
        layer.to(config.params_dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def run(layer: torch.nn.Module, tokens: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return output, gradient of the tokens and gradient of every parameter by name, for tokens and ``grad`` [sequence,
    batch, H]."""
    tokens = tokens.detach().requires_grad_()
    output, _ = layer(tokens)
    output.backward(grad)
    found: dict[str, Any] = {"output": output.detach(), "tokens": tokens.grad}
    return found | {name: parameter.grad for name, parameter in layer.named_parameters()}

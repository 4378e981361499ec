"""Global parameter names: they identify a tensor on every rank.

A global name is the parameter's name in the model on one rank: layers and experts are counted over the whole model
(from 0, as in Megatron's own state dicts).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.(linear_fc[12]\.(?:weight|bias))(\d+)$")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the GPT model inside DDP and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def global_name(local_name: str, *, layer_offset: int, expert_ids: Mapping[int, Sequence[int]]) -> str:
    """Convert a parameter's name on one rank to its global name.

    ``layer_offset`` is the number of layers before this chunk; ``expert_ids`` gives, by the layer's local number, the
    experts that the rank holds there, in the order of its modules.
    """
    layer = _LAYER.search(local_name)
    if layer is None:
        return local_name
    local_layer = int(layer[2])
    name = _LAYER.sub(lambda m: f"{m[1]}layers.{local_layer + layer_offset}.", local_name)
    ids = expert_ids.get(local_layer, ())
    if ".experts." not in name or not ids:
        return name
    name = _GROUPED_EXPERT.sub(lambda m: f".local_experts.{m[2]}.{m[1]}", name)
    return _LOCAL_EXPERT.sub(lambda m: f".local_experts.{ids[int(m[1])]}.", name)


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Iterate over (global name, parameter) of one model chunk, in the chunk's own order."""
    chunk = unwrap(model)
    layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
    layer_offset = layers[0].layer_number - 1 if len(layers) else 0
    expert_ids = {number: getattr(layer.mlp, "local_expert_indices", ()) for number, layer in enumerate(layers)}
    for name, parameter in chunk.named_parameters():
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            # The last stage's copy of the embedding has the name of the embedding.
            name = "embedding.word_embeddings.weight"
        yield global_name(name, layer_offset=layer_offset, expert_ids=expert_ids), parameter

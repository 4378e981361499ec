"""Global parameter names: the one identity of a tensor, whatever rank holds it.

A parameter is called by its name in the model on one rank: layers and experts are counted over the
whole model (from 0, as in Megatron's own state dicts).
"""

import re
from collections.abc import Iterator

import torch

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPT model inside DDP and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def global_name(local_name: str, *, layer_offset: int, expert_offset: int) -> str:
    """The global form of a parameter's name on a rank whose layers and experts start at the offsets."""
    name = _LAYER.sub(lambda m: f"{m[1]}layers.{int(m[2]) + layer_offset}.", local_name)
    name = _LOCAL_EXPERT.sub(lambda m: f".local_experts.{int(m[1]) + expert_offset}.", name)
    grouped = _GROUPED_EXPERT.search(name)
    if grouped is None:
        return name
    kind, parameter = grouped[1].rsplit(".", 1)
    head, layer = kind.rsplit(".", 1)
    return f"{name[: grouped.start()]}{head}.local_experts.{int(grouped[2]) + expert_offset}.{layer}.{parameter}"


def offsets(chunk: torch.nn.Module) -> tuple[int, int]:
    """(layers before this chunk, experts before this rank's in every mixture layer)."""
    layers = list(chunk.decoder.layers)  # type: ignore[union-attr, arg-type]
    if not layers:
        return 0, 0
    experts = {
        layer.mlp.local_expert_indices[0] for layer in layers if getattr(layer.mlp, "local_expert_indices", None)
    }
    assert len(experts) <= 1, f"layers of one rank hold experts that start at different indices: {experts}"
    return layers[0].layer_number - 1, experts.pop() if experts else 0


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of one model chunk, in the chunk's own order."""
    chunk = unwrap(model)
    tied = chunk.share_embeddings_and_output_weights
    layer_offset, expert_offset = offsets(chunk)
    for name, parameter in chunk.named_parameters():
        if tied and name == "output_layer.weight":
            # The last stage's copy of the embedding is the embedding.
            name = "embedding.word_embeddings.weight"
        yield global_name(name, layer_offset=layer_offset, expert_offset=expert_offset), parameter

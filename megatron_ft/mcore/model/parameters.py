"""Global parameter names, and initial weights, which depend only on the seed and the name, not on the layout."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.config.model import ModelConfig
from megatron_ft.mcore.model.transformer_config import output_layer_std

# A global name is the name that the parameter would have if one rank had the whole model. Layers and experts are
# counted from 0, as in Megatron's state dicts.

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.(linear_fc[12]\.(?:weight|bias))(\d+)$")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the GPT model that ``model`` wraps for data parallelism and mixed precision."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def _global_name(local_name: str, *, layer_offset: int, expert_ids: Mapping[int, Sequence[int]]) -> str:
    """Convert the name of a parameter in one model chunk to its global name. ``layer_offset`` is the number of layers
    before this chunk. ``expert_ids`` lists, for each layer of the chunk (counted from 0), the experts that this rank
    has, in the order of its modules."""
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
    """Yield (global name, parameter) for each parameter of one model chunk, in the order of the chunk's modules."""
    chunk = unwrap(model)
    layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
    layer_offset = layers[0].layer_number - 1 if len(layers) else 0
    expert_ids = {number: getattr(layer.mlp, "local_expert_indices", ()) for number, layer in enumerate(layers)}
    for name, parameter in chunk.named_parameters():
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            # The output layer of the last stage is a copy of the word embedding, so it gets the name of the embedding.
            name = "embedding.word_embeddings.weight"
        yield _global_name(name, layer_offset=layer_offset, expert_ids=expert_ids), parameter


_RESIDUAL_WRITERS = ("linear_proj.weight", "linear_fc2.weight")


def initialize_weights(
    model: torch.nn.Module, config: ModelConfig, *, seed: int, pg_collection: ProcessGroupCollection
) -> None:
    """Initialize every parameter of a model chunk in place.

    Biases are 0 and norm weights 1. Matrices are drawn from a normal distribution with standard deviation
    ``init_method_std``, divided by sqrt(2 * num_layers) if their output is added to the residual stream. Each rank
    draws the whole matrix in FP32 on the CPU, with a generator seeded from ``seed`` and the name, and uses its
    tensor-parallel part.
    """
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            shape = _full_shape(parameter, _tensor_group(name, pg_collection).size())
            parameter.copy_(own_part(draw(name, shape, config, seed), parameter, name, config, pg_collection))


def _is_sharded(parameter: torch.nn.Parameter, tp_size: int) -> bool:
    return tp_size > 1 and getattr(parameter, "tensor_model_parallel", False)


def _full_shape(parameter: torch.nn.Parameter, tp_size: int) -> torch.Size:
    shape = list(parameter.shape)
    if _is_sharded(parameter, tp_size):
        shape[parameter.partition_dim] *= tp_size  # type: ignore[attr-defined]
    return torch.Size(shape)


def generator_for(name: str, seed: int) -> torch.Generator:
    """Return a generator on the CPU whose numbers depend only on ``name`` and ``seed``."""
    # Always on the CPU, because CUDA's generator gives other numbers for the same seed.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> torch.Tensor:
    """Return the initial value of the whole parameter with the global name ``name``, in FP32 on the CPU."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.rsplit(".", 2)[-2] or name.endswith("layer_norm_weight"):
        return torch.ones(shape)
    std = output_layer_std(config) if name.endswith(_RESIDUAL_WRITERS) else config.init_method_std
    return torch.empty(shape).normal_(0.0, std, generator=generator_for(name, seed))


def own_part(
    full: torch.Tensor,
    parameter: torch.nn.Parameter,
    name: str,
    config: ModelConfig,
    pg_collection: ProcessGroupCollection,
) -> torch.Tensor:
    """Return the part of the unsharded tensor ``full`` that belongs in this rank's ``parameter``. ``name`` is the
    global name of the parameter."""
    group = _tensor_group(name, pg_collection)
    tp_rank, tp_size = group.rank(), group.size()
    if not _is_sharded(parameter, tp_size):
        return full
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    # The first layer of a gated MLP stacks [gate; up], and each rank has a part of both.
    parts = full.chunk(2, dim) if config.gated_linear_unit and "linear_fc1." in name else (full,)
    return torch.cat([part.chunk(tp_size, dim)[tp_rank] for part in parts], dim)


def tensor_part(name: str, parameter: torch.nn.Parameter, pg_collection: ProcessGroupCollection) -> int:
    """Return the index of the tensor-parallel part of ``parameter`` that this rank has: 0 to TP - 1, or 0 if the
    parameter is not sharded. ``name`` is its global name."""
    group = _tensor_group(name, pg_collection)
    return group.rank() if _is_sharded(parameter, group.size()) else 0


def _tensor_group(name: str, pg_collection: ProcessGroupCollection) -> dist.ProcessGroup:
    # The group over which the parameter is sharded. Experts have a tensor-parallel group of their own.
    return pg_collection.expt_tp if ".experts." in name else pg_collection.tp

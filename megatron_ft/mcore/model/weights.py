"""Initial weights: a pure function of (seed, global parameter name), independent of the layout."""

import hashlib

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.config.model import ModelConfig
from megatron_ft.mcore.model.names import named_parameters
from megatron_ft.mcore.model.transformer_config import output_layer_std

_RESIDUAL_WRITERS = ("linear_proj.weight", "linear_fc2.weight")


def initialize_weights(
    model: torch.nn.Module, config: ModelConfig, *, seed: int, pg_collection: ProcessGroupCollection
) -> None:
    """Set every parameter of a model chunk in place.

    Matrices are normal with ``init_method_std`` (over sqrt(2 * num_layers) if they write into the residual stream),
    norms are one, biases zero. Each matrix is drawn whole, on the CPU in FP32, from a generator seeded by its name; a
    tensor-parallel rank keeps its part.
    """
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            shape = _full_shape(parameter, _tensor_group(name, pg_collection).size())
            parameter.copy_(own_part(_draw(name, shape, config, seed), parameter, name, config, pg_collection))


def _is_sharded(parameter: torch.nn.Parameter, tp_size: int) -> bool:
    return tp_size > 1 and getattr(parameter, "tensor_model_parallel", False)


def _full_shape(parameter: torch.nn.Parameter, tp_size: int) -> torch.Size:
    shape = list(parameter.shape)
    if _is_sharded(parameter, tp_size):
        shape[parameter.partition_dim] *= tp_size  # type: ignore[attr-defined]
    return torch.Size(shape)


def _draw(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.rsplit(".", 2)[-2] or name.endswith("layer_norm_weight"):
        return torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    std = output_layer_std(config) if name.endswith(_RESIDUAL_WRITERS) else config.init_method_std
    # On the CPU whatever the device: CUDA's generator gives other numbers for the same seed.
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def own_part(
    full: torch.Tensor,
    parameter: torch.nn.Parameter,
    name: str,
    config: ModelConfig,
    pg_collection: ProcessGroupCollection,
) -> torch.Tensor:
    """Return the part of the whole tensor ``full`` that this rank's ``parameter`` (global ``name``) holds."""
    group = _tensor_group(name, pg_collection)
    tp_rank, tp_size = group.rank(), group.size()
    if not _is_sharded(parameter, tp_size):
        return full
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    # A gated first layer stacks [gate; up]: each rank holds its part of both.
    parts = full.chunk(2, dim) if config.gated_linear_unit and "linear_fc1." in name else (full,)
    return torch.cat([part.chunk(tp_size, dim)[tp_rank] for part in parts], dim)


def tensor_part(name: str, parameter: torch.nn.Parameter, pg_collection: ProcessGroupCollection) -> int:
    """Return the number of the tensor-parallel part of global parameter ``name`` that this rank has; 0 if it is not
    split."""
    group = _tensor_group(name, pg_collection)
    return group.rank() if _is_sharded(parameter, group.size()) else 0


def _tensor_group(name: str, pg_collection: ProcessGroupCollection) -> dist.ProcessGroup:
    # Return the ranks over which a parameter's matrices are split; experts have a tensor parallelism of their own.
    return pg_collection.expt_tp if ".experts." in name else pg_collection.tp

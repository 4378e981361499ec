"""Makes the weights of an MoE model from those of a dense model (upcycling; arXiv 2212.05055).

Every MLP becomes an MoE layer whose experts are copies of the MLP. The probabilities that the router gives to a token's
chosen experts have the sum 1. So, without noise, the new model computes the same outputs as the dense model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_ft.config.checks.model import check
from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.mcore.convert.model_tensors import norm_before_mlp
from megatron_ft.mcore.convert.weights import (
    MOST_FILE_BYTES,
    Progress,
    manifest_of,
    model_keys,
    open_weights,
    origin_of,
    size_of,
    weights_manifest,
    write_weights,
)
from megatron_ft.mcore.model.transformer_config import draw, generator_for
from megatron_ft.snapshot.storage.manifest import Manifest

_MLP, _NORM = ".mlp.", ".layer_norm_"
_DEFAULT = ModelConfig()
_MIXTURE = tuple(field.name for field in fields(ModelConfig) if field.name.startswith("moe_"))
_PROGRESS_TENSORS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycling:
    """Settings with which an MoE model is made from a dense model."""

    num_experts: int
    topk: int
    noise: float = 0.0
    """Standard deviation of the normal noise that is added to the weights of each expert."""
    seed: int = 1234
    """Seed of the noise and of the routers."""

    def model(self, dense: ModelConfig) -> ModelConfig:
        """Return the MoE model for a dense model.

        Raises:
            ConfigError: a setting is not valid.
        """
        if self.num_experts < 2:
            raise ConfigError.of("--experts", self.num_experts, "must be at least 2")
        if not 1 <= self.topk <= self.num_experts:
            raise ConfigError.of("--topk", self.topk, f"must be in 1..{self.num_experts}, the number of experts")
        if self.topk == 1:
            # Top-1 needs pre-softmax. Router weights are then below 1, so outputs would differ from the dense model's.
            raise ConfigError.of("--topk", 1, "must be at least 2: with 1, the router would scale the outputs down")
        if not 0 <= self.noise < float("inf"):
            raise ConfigError.of("--noise", self.noise, "must be at least 0")
        if not 0 <= self.seed < 2**31:
            raise ConfigError.of("--seed", self.seed, "must be in 0..2147483647")
        # A dense run may have set keys of MoE layers, which had no effect. So these keys get their default values.
        defaults = {name: getattr(_DEFAULT, name) for name in _MIXTURE}
        mixture = {"num_moe_experts": self.num_experts, "moe_router_topk": self.topk}
        sizes = {"moe_ffn_hidden_size": dense.ffn_hidden_size}
        found = replace(dense, **{**defaults, **mixture, **sizes, "router": "learned", "router_trace_file": None})
        check(replace(JobConfig(), model=found))
        return found


def upcycle_weights(
    checkpoint: Path,
    out: Path,
    upcycling: Upcycling,
    *,
    most_file_bytes: int = MOST_FILE_BYTES,
    progress: Progress = print,
) -> Manifest:
    """Write the weights of an MoE model whose experts are copies of the MLPs of a dense checkpoint. At any time, one
    tensor and one copy of it are in memory.

    Args:
        checkpoint: dense checkpoint, or checkpoint of weights, of a model with ``num_moe_experts=null``.
        progress: receives a line for every thousand tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or its model is not dense.
        ConfigError: a setting is not valid, ``out`` exists, or the disk has too little space.
        OSError: a file cannot be written.
    """
    reader = open_weights(checkpoint)
    dense = reader.model()
    if dense.num_moe_experts is not None:
        raise CheckpointError(
            f"{checkpoint}: has model.num_moe_experts={dense.num_moe_experts}: must be null (a dense model)"
        )
    if dense.add_bias_linear:
        raise CheckpointError(
            f"{checkpoint}: has model.add_bias_linear=true: must be false, because experts have no bias"
        )
    model = upcycling.model(dense)
    changed = {f"model.{name}": value for name, value in vars(model).items() if value != getattr(dense, name)}
    parts = [name for name in reader.weights if _is_copied(name)]
    copied = sum(size_of(reader, name) for name in parts)
    routers = dense.num_layers * upcycling.num_experts * dense.hidden_size * _dtype(reader).itemsize
    whole = sum(size_of(reader, name) for name in reader.weights)
    origin = {"upcycled_from": origin_of(reader), "noise": upcycling.noise, "seed": upcycling.seed}
    return write_weights(
        out,
        _counted(_tensors(reader, model, upcycling), progress),
        weights_manifest(manifest_of(reader).run_name, {**model_keys(reader), **changed}, origin),
        num_bytes=whole + (upcycling.num_experts - 1) * copied + routers,
        most_file_bytes=most_file_bytes,
    )


def _is_copied(name: str) -> bool:
    # The norm before the MLP stays a tensor of the layer; experts have no norm.
    return _MLP in name and _NORM not in name


def _renamed(name: str, model: ModelConfig) -> str:
    """Return the name in the MoE model of a tensor that no expert copies. Only a norm before an MLP can be renamed."""
    dense, mixture = (norm_before_mlp(model, has_experts=has_experts) for has_experts in (False, True))
    return name.replace(f".{dense}", f".{mixture}")


def _router(layer: int) -> str:
    return f"decoder.layers.{layer}.mlp.router.weight"


def _last(layer: int) -> str:
    return f"decoder.layers.{layer}.mlp.linear_fc2.weight"


def _dtype(reader: DenseReader) -> torch.dtype:
    found: torch.dtype = reader.weights[_last(0)].properties.dtype
    return found


def _tensors(reader: DenseReader, model: ModelConfig, upcycling: Upcycling) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(reader.weights):
        tensor = reader.read(name)
        if not _is_copied(name):
            yield _renamed(name, model), tensor
            continue
        before, after = name.split(_MLP)
        for expert in range(upcycling.num_experts):
            copy = f"{before}{_MLP}experts.experts.{expert}.{after}"
            yield copy, _with_noise(copy, tensor, upcycling)
    for layer in range(model.num_layers):
        shape = torch.Size((upcycling.num_experts, model.hidden_size))
        yield _router(layer), draw(_router(layer), shape, model, upcycling.seed).to(_dtype(reader))


def _with_noise(name: str, tensor: torch.Tensor, upcycling: Upcycling) -> torch.Tensor:
    if not upcycling.noise:
        return tensor
    noise = torch.empty(prod(tensor.shape)).normal_(
        0.0, upcycling.noise, generator=generator_for(f"noise/{name}", upcycling.seed)
    )
    return (tensor.float() + noise.view(tensor.shape)).to(tensor.dtype)


def _counted(tensors: Iterator[tuple[str, Any]], progress: Progress) -> Iterator[tuple[str, Any]]:
    number = 0
    for number, named in enumerate(tensors, 1):
        yield named
        if number % _PROGRESS_TENSORS == 0:
            progress(f"{number} tensors")
    progress(f"{number} tensors")

"""Checksums of a rank's whole state, by global parameter name; equal digests mean equal bits."""

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.mcore.checkpoint.optimizer_state import allocate_state, sub_optimizers
from megatron_ft.mcore.model.names import named_parameters, unwrap


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the hexadecimal xxh3_128 of the tensor's bytes, dtype and shape."""
    # Equal bytes are not equal tensors: zeros of two dtypes differ.
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(content.numpy().data)
    return digest.hexdigest()


def named_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every parameter, persistent buffer, master and moment on this rank.

    Names are ``<parameter>``, ``<parameter>/master``, ``<parameter>/exp_avg``...; with the distributed optimizer
    masters and moments are this rank's flat ranges.
    """
    names: dict[torch.nn.Parameter, str] = {}
    for number, chunk in enumerate(model_chunks):
        for name, parameter in named_parameters(chunk):
            names[parameter] = name
            yield name, parameter
        parameters = {name for name, _ in unwrap(chunk).named_parameters()}
        for name, tensor in unwrap(chunk).state_dict().items():
            if name not in parameters and torch.is_tensor(tensor):
                yield f"buffer.{number}.{name}", tensor
    for member in sub_optimizers(optimizer):
        for parameter, master in masters_of(member):
            if master is not parameter:
                yield f"{names[parameter]}/master", master
            for kind, value in sorted(member.optimizer.state.get(master, {}).items()):
                if torch.is_tensor(value):
                    yield f"{names[parameter]}/{kind}", value


def masters_of(member: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield (model parameter, the tensor that the inner optimizer updates for it)."""
    for parameters, masters in _group_pairs(member):
        for parameter, master in zip(parameters, masters, strict=True):
            # None with Megatron's precision-aware optimizer, which keeps masters in the inner one.
            if master is not None:
                yield parameter, master


def _group_pairs(member: Any) -> Iterator[tuple[Any, Any]]:
    # Megatron keeps parameters and the tensors that are updated for them in parallel lists, one pair for each group.
    if isinstance(member, DistributedOptimizer):
        yield from zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
        yield from zip(member.model_fp32_groups, member.shard_fp32_groups, strict=True)
    elif hasattr(member, "fp32_from_float16_groups"):
        yield from zip(member.float16_groups, member.fp32_from_float16_groups, strict=True)
        yield from zip(member.fp32_from_fp32_groups, member.fp32_from_fp32_groups, strict=True)
    else:
        groups = [group["params"] for group in member.optimizer.param_groups]
        yield from zip(groups, groups, strict=True)


def state_digest(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> str:
    """Return one digest over all of :func:`tensor_digests`, independent of the order of iteration."""
    total = xxhash.xxh3_128()
    for name, digest in sorted(tensor_digests(model_chunks, optimizer).items()):
        total.update(f"{name}={digest}\n".encode())
    return total.hexdigest()


def tensor_digests(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> dict[str, str]:
    """Return the digest of every tensor of :func:`named_state` by name, to locate differences of two states.

    Moments that no update has created yet are created: they count as the zeros with which they will start.
    """
    allocate_state(optimizer)
    return {name: tensor_digest(tensor) for name, tensor in named_state(model_chunks, optimizer)}

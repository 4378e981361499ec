"""Operators that compute outputs and input gradients only, while an iteration is replayed.

Their parameters take no gradient from forward to the end of backward, and do again before gradients are reduced: in
the buckets they keep their place, with zeros, because the order of summation depends on it. Megatron's linear layers
look at ``requires_grad`` of the weight they are given, and reduce input gradients in the same way without it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ft.mcore.model.names import named_parameters, unwrap
from megatron_ft.operator_state import operator_of
from megatron_ft.operators import OperatorId


def parameters_of(
    model_chunks: Sequence[torch.nn.Module], operators: Collection[OperatorId], num_layers: int
) -> set[torch.nn.Parameter]:
    """Parameters of ``operators`` on this rank."""
    return {
        parameter
        for chunk in model_chunks
        for name, parameter in named_parameters(chunk)
        if operator_of(name, num_layers) in operators
    }


@contextmanager
def frozen(
    model_chunks: Sequence[torch.nn.Module], parameters: Collection[torch.nn.Parameter]
) -> Iterator[Callable[[], None]]:
    """No gradients for ``parameters`` until the callable this gives is called; at the latest at the end."""
    taken = [parameter for parameter in parameters if parameter.requires_grad]
    hooks = [_keep_gradients_flowing(chunk) for chunk in model_chunks if hasattr(unwrap(chunk), "embedding")]

    def thaw() -> None:
        for parameter in taken:
            parameter.requires_grad_(True)

    for parameter in taken:
        parameter.requires_grad_(False)
    try:
        yield thaw
    finally:
        thaw()
        for hook in hooks:
            hook.remove()


def _keep_gradients_flowing(chunk: torch.nn.Module) -> Any:
    """Have layers above a frozen embedding compute input gradients as before: recomputation asks for them."""

    def require_gradient(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    return unwrap(chunk).embedding.register_forward_hook(require_gradient)  # type: ignore[union-attr, operator]


@contextmanager
def synchronous_reduction(model_chunks: Sequence[torch.nn.Module], config: Any) -> Iterator[None]:
    """Reduce gradients after the last backward, bucket by bucket: a frozen parameter never says it is ready."""
    ddp_configs = [chunk.ddp_config for chunk in model_chunks]
    overlapped = [ddp_config.overlap_grad_reduce for ddp_config in ddp_configs]
    grad_sync_func = config.grad_sync_func
    config.grad_sync_func = None
    for ddp_config in ddp_configs:
        ddp_config.overlap_grad_reduce = False
    try:
        yield
    finally:
        config.grad_sync_func = grad_sync_func
        for ddp_config, was_overlapped in zip(ddp_configs, overlapped, strict=True):
            ddp_config.overlap_grad_reduce = was_overlapped

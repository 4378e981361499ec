"""Handles the differences between the supported releases of Megatron-Core. No other module tests the release.

Megatron is imported only inside functions, because a process must first be prepared for it (``device/install.py``).
"""

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

RELEASE = Version(importlib.metadata.version("megatron-core")).release
"""Version of the installed Megatron-Core release as a tuple, e.g. (0, 16, 1)."""
_HAS_0_17, _HAS_0_18, _HAS_0_19 = ((0, minor) <= RELEASE for minor in (17, 18, 19))

NOT_NEWS = (
    # Appears until 0.17 for each MoE layer of the project: Megatron passes process groups only to its own class.
    "Unknown MLP type",
    # Appears from 0.17, because the project plans saves with Megatron's own code.
    "MCore's async save is deprecated",
    # Appears from 0.18, because Megatron computes the layout of gradient buffers.
    "DistributedDataParallel: full_param_layout not provided",
    # Appears from 0.19, because Megatron will replace the model class.
    "GPTModel IS DEPRECATED",
    "No CUDA runtime is found",
)
"""Beginnings of warnings from Megatron and torch that are hidden, because they do not concern users."""
LOGGERS = (
    "megatron.core.transformer.transformer_layer",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.models.gpt.gpt_model",
)
"""Loggers of Megatron that emit the warnings in ``NOT_NEWS``, which are hidden."""


def submodules_of(spec: Any) -> Any:
    """Return the submodules of a part of a layer spec; None if the part has none.

    A part is a ``ModuleSpec``, a class, or ``partial(class, submodules=...)``. Megatron uses partials for experts and
    shared experts from 0.17, and for every MLP from 0.18.
    """
    if isinstance(spec, functools.partial):
        return spec.keywords.get("submodules")
    return getattr(spec, "submodules", None)


def build_part(spec: Any, *arguments: Any, **named: Any) -> Any:
    """Build a module from a part of a layer spec (see ``submodules_of``)."""
    from megatron.core.transformer.spec_utils import build_module

    return spec(*arguments, **named) if isinstance(spec, functools.partial) else build_module(spec, *arguments, **named)


def use_mlp_class(layer: Any, module: type, pg_collection: Any, arguments: dict[str, Any]) -> None:
    """Set the class of a layer's MLP to ``module``. ``layer``, the ``submodules`` of the layer's spec, is changed.

    ``arguments`` are further arguments of ``module``. Until 0.17, Megatron passes process groups only to its own class,
    so the spec contains them. From 0.18, Megatron passes process groups, ``is_mtp_layer`` and ``name`` to any class.
    """
    if _HAS_0_18:
        layer.mlp = functools.partial(module, submodules=submodules_of(layer.mlp), **arguments)
    else:
        layer.mlp.module = module
        layer.mlp.params = {"pg_collection": pg_collection, **arguments}


def plan_save(strategy: Any, shards: dict[str, Any], directory: Any) -> None:
    """Call ``async_save`` of a save strategy of Megatron, so that Megatron's own code plans the save. From 0.17, the
    default is the code of ``nvidia-resiliency-ext``, another package, which makes other plans."""
    if _HAS_0_17:
        strategy.async_save(shards, directory, async_strategy="mcore")
    else:
        strategy.async_save(shards, directory)


def balancing_token_count(num_tokens: int, num_shares: int) -> int:
    """Return the token count to pass to ``TopKRouter.attach_and_log_load_balancing_loss``, so that a balancing loss has
    the weight ``num_tokens * num_shares``. From 0.19, Megatron itself multiplies the count by the number of shares.

    Args:
        num_tokens: tokens of a microbatch on this rank.
        num_shares: number of tensor- and context-parallel ranks that share the tokens of a microbatch.
    """
    return num_tokens if _HAS_0_19 else num_tokens * num_shares


def record_auxiliary_loss(name: str, value: torch.Tensor, layer_number: int, num_layers: int) -> None:
    """Add the scalar ``value`` to the auxiliary loss ``name`` of a layer, numbered from 1, in Megatron's tracker."""
    _recorder()(name, value, layer_number, num_layers)


@functools.cache
def _recorder() -> Callable[..., None]:
    if _HAS_0_18:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        return lambda *values: get_moe_metrics_tracker().record(*values)
    from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

    return save_to_aux_losses_tracker  # type: ignore[no-any-return]


def auxiliary_losses(*, forget: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of auxiliary losses in Megatron's tracker, by name, without a copy: one number per layer.

    From 0.18, the tracker is an object. Megatron's function that returned the tracker before 0.18 now returns a copy.

    Args:
        forget: also remove the tracker's entries, which reference process groups.
    """
    if _HAS_0_18:
        from megatron.core.transformer.moe import moe_logging

        found = {name: entry.values for name, entry in moe_logging.get_moe_metrics_tracker().metrics.items()}
        if forget:
            moe_logging.destroy_moe_metrics_tracker()
        return found
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    tracker = get_moe_layer_wise_logging_tracker()
    found = {name: entry["values"] for name, entry in tracker.items()}
    if forget:
        tracker.clear()
    return found

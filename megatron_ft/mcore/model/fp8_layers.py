"""Linear layers of Megatron's local spec with FP8 operands (``precision.fp8``).

Weights stay parameters in ``precision.params_dtype``. Each product quantizes its operands, with scales that follow from
the operands alone. So windows, checkpoints and replays need no other state than without FP8. With ``precision.regime``,
the weights have values that FP8 codes with scales of 64 consecutive elements hold exactly.
Embedding, router, norms and output layer are not quantized.
"""

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_ft.config.job import PrecisionConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.versions import submodules_of
from transformer_engine_ext.linear import LinearScalers, linear
from transformer_engine_ext.providers import ProviderError, provider_for
from transformer_engine_ext.recipes import Recipe


class _Fp8Product:
    """Replaces the product of one of Megatron's linear layers."""

    scalers: LinearScalers
    weight: torch.nn.Parameter

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.weight.has_fp8_values = True  # type: ignore[attr-defined]

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **others: Any
    ) -> torch.Tensor:
        # With tensor parallelism, the product would also have to gather inputs and to sum their gradients.
        assert not others["allreduce_dgrad"] and not others["sequence_parallel"], "FP8 needs TP=1"
        found = linear(input, weight, self.scalers)
        return found if bias is None else found + bias


class Fp8ColumnParallelLinear(_Fp8Product, ColumnParallelLinear):
    """Megatron's layer whose output features are split over tensor-parallel ranks, with FP8 operands."""


class Fp8RowParallelLinear(_Fp8Product, RowParallelLinear):
    """Megatron's layer whose input features are split over tensor-parallel ranks, with FP8 operands."""


_LAYERS: dict[type, type] = {ColumnParallelLinear: Fp8ColumnParallelLinear, RowParallelLinear: Fp8RowParallelLinear}


def use_fp8(submodules: Any, precision: PrecisionConfig, device: torch.device) -> None:
    """Replace every linear layer of a layer spec by a layer with FP8 operands.

    Args:
        submodules: ``submodules`` of a layer's spec, which is changed. It must belong to this layer alone.

    Raises:
        ConfigError: torch cannot compute products with the recipe on ``device``.
    """
    recipe = Recipe(scaling=precision.fp8_recipe, is_hybrid=precision.fp8 == "hybrid")
    try:
        scalers = LinearScalers.of(provider_for("torch", recipe, device), recipe, device)
    except ProviderError as error:
        raise ConfigError.of("precision.fp8_recipe", precision.fp8_recipe, f"is not supported: {error}") from error
    _replace(submodules, scalers)


def _replace(submodules: Any, scalers: LinearScalers) -> None:
    for found in fields(submodules):
        value = getattr(submodules, found.name)
        if isinstance(value, type) and value in _LAYERS:
            setattr(submodules, found.name, type(_LAYERS[value].__name__, (_LAYERS[value],), {"scalers": scalers}))
        elif is_dataclass(inner := submodules_of(value)):
            _replace(inner, scalers)

"""Linear layers of Megatron's local spec with FP8 operands (``precision.fp8``).

Weights stay parameters in ``precision.params_dtype``, and each product quantizes its operands. Without delayed scaling,
the scales depend only on the operands. With delayed scaling, they depend on the largest magnitudes (amax) of earlier
iterations, which each transformer layer keeps in a buffer. Like a router's bias, the buffer is training state: windows
and checkpoints contain it, joining ranks receive it, and rollbacks restore it. It has entries for all experts and is
equal on all ranks of a pipeline stage. With ``precision.regime``, weights are rounded so that FP8 codes with one scale
per 64 elements represent them exactly. Embedding, router, norms and output layer are not quantized.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_ft.config.job import PrecisionConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.model.transformer_config import unwrap
from megatron_ft.mcore.versions import submodules_of
from transformer_engine_ext.linear import LinearScalers, linear
from transformer_engine_ext.providers import Provider, ProviderError, provider_for
from transformer_engine_ext.recipes import AMAX_HISTORY, ROLES, AmaxHistory, Recipe


class _Fp8Product:
    """Mixin with which a linear layer of Megatron computes its matrix product with FP8 operands."""

    scalers: LinearScalers
    """Scalers, which compute the scales of the operands. All layers share them, except with delayed scaling."""
    provider: Provider
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
        submodules: ``submodules`` of a layer's spec, which is changed. No other layer may use the same object.

    Raises:
        ConfigError: torch cannot compute products with the recipe on ``device``.
    """
    recipe = _recipe_of(precision)
    try:
        provider = provider_for("torch", recipe, device)
    except ProviderError as error:
        raise ConfigError.of("precision.fp8_recipe", precision.fp8_recipe, f"is not supported: {error}") from error
    _replace(submodules, None if recipe.scaling == "delayed" else LinearScalers.of(provider, recipe), provider)


def _recipe_of(precision: PrecisionConfig) -> Recipe:
    return Recipe(scaling=precision.fp8_recipe, is_hybrid=precision.fp8 == "hybrid")


def _replace(submodules: Any, scalers: LinearScalers | None, provider: Provider) -> None:
    for found in fields(submodules):
        value = getattr(submodules, found.name)
        if isinstance(value, type) and value in _LAYERS:
            given = {"scalers": scalers, "provider": provider}
            setattr(submodules, found.name, type(_LAYERS[value].__name__, (_LAYERS[value],), given))
        elif is_dataclass(inner := submodules_of(value)):
            _replace(inner, scalers, provider)


class _LayerHistory:
    """Amax history of the operands of all linear layers in a transformer layer. The order is the same in every layout:
    the linear layers outside the routed experts by name, then both linear layers of each expert by id."""

    def __init__(self, layer: Any, precision: PrecisionConfig, num_experts: int) -> None:
        self._mixture = layer.mlp if hasattr(layer.mlp, "experts") else None
        products = {name: found for name, found in layer.named_modules() if isinstance(found, _Fp8Product)}
        others = [found for name, found in sorted(products.items()) if ".local_experts." not in name]
        self._first = len(others)
        self._provider, self._recipe = next(iter(products.values())).provider, _recipe_of(precision)
        num_products = self._first + (0 if self._mixture is None else 2 * num_experts)
        shape = (precision.fp8_amax_history_length, num_products, len(ROLES))
        layer.register_buffer(AMAX_HISTORY, torch.zeros(shape, device=next(layer.parameters()).device))
        self.amax = AmaxHistory(self._recipe, getattr(layer, AMAX_HISTORY))
        self._places: Sequence[int] = ()
        for number, found in enumerate(others):
            found.scalers = self._scalers(number)

    def begin(self) -> None:
        """Compute the scales for an iteration or evaluation that begins. If this rank has other experts than before,
        let the new experts' linear layers use the history entries of these experts."""
        self.amax.begin()
        if self._mixture is None or self._places == self._mixture.local_expert_indices:
            return
        # The rank has other experts now. The history stays, because all ranks have the magnitudes of all experts.
        self._places = list(self._mixture.local_expert_indices)
        for expert, module in zip(self._places, self._mixture.experts.local_experts, strict=True):
            for number, found in enumerate((module.linear_fc1, module.linear_fc2)):
                found.scalers = self._scalers(self._first + 2 * expert + number)

    def _scalers(self, number: int) -> LinearScalers:
        return LinearScalers.of(self._provider, self._recipe, self.amax, number)


def add_histories(chunk: Any, precision: PrecisionConfig, num_experts: int) -> None:
    """Add the history of delayed scaling to each transformer layer of a model chunk, as an FP32 buffer. Call this after
    the chunk was converted to 16 bits, because the conversion would change the buffers, too."""
    for layer in chunk.decoder.layers:
        layer.delayed_scaling = _LayerHistory(layer, precision, num_experts)


class DelayedScaling:
    """Histories of delayed scaling (FP8) of all layers of this rank. With other recipes, the methods do nothing."""

    def __init__(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        self._layers = list(_histories(model_chunks))

    def begin(self) -> None:
        """Begin an iteration or an evaluation: compute scales, and discard the amax of an unfinished iteration."""
        for layer in self._layers:
            layer.begin()

    def combine(self, group: dist.ProcessGroup) -> None:
        """Replace this iteration's amax (largest magnitudes) by their maxima over ``group``, the ranks of this pipeline
        stage. Call this before the vote: after it, survivors may have to finish the iteration without lost ranks."""
        if not self._layers:
            return
        newest = [layer.amax.newest for layer in self._layers]
        flat = torch.cat([found.view(-1) for found in newest])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        for found, part in zip(newest, flat.split([found.numel() for found in newest]), strict=True):
            found.copy_(part.view_as(found))

    def advance(self) -> None:
        """Add this iteration's amax (largest magnitudes) to the histories, after the iteration was committed."""
        for layer in self._layers:
            layer.amax.advance()


def _histories(model_chunks: Sequence[torch.nn.Module]) -> Iterator[_LayerHistory]:
    for chunk in model_chunks:
        for layer in unwrap(chunk).decoder.layers:  # type: ignore[union-attr]
            if hasattr(layer, "delayed_scaling"):
                yield layer.delayed_scaling

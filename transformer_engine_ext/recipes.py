"""Scaling recipes of FP8: which elements of a tensor share a scale, and from which values the scale is computed."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from transformer_engine_ext.formats import E4M3, E5M2, Format
from transformer_engine_ext.quantized import (
    BLOCK_ELEMENTS,
    QuantizedTensor,
    largest_finite,
    quantize_blocks,
    quantize_tensor,
    scales_for,
)

ROLES = ("weight", "input", "output_gradient")
"""Roles of the tensors that a linear layer quantizes."""
AMAX_HISTORY = "fp8_amax_history"
"""Name of a transformer layer's buffer that contains the history of delayed scaling (``AmaxHistory.history``)."""


class Scaler(Protocol):
    """Quantizes the tensors of one role (a weight, an input, an output gradient) of one layer."""

    def quantize(self, values: torch.Tensor) -> QuantizedTensor:
        """Quantize FP32, BF16 or FP16 ``values`` of any shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorwiseScaler:
    """Quantizes a tensor with one scale, computed from the tensor's largest magnitude ("current scaling")."""

    target: Format

    def quantize(self, values: torch.Tensor) -> QuantizedTensor:
        """Quantize ``values``; no finite value is clamped."""
        amax = largest_finite(values.to(torch.float32).reshape(1, values.numel()))
        return quantize_tensor(values, self.target, scales_for(amax, self.target))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseScaler:
    """Quantizes a tensor with a scale for each block of consecutive elements, from the block's largest magnitude."""

    target: Format
    block_elements: int = BLOCK_ELEMENTS

    def quantize(self, values: torch.Tensor) -> QuantizedTensor:
        """Quantize ``values``; no finite value is clamped."""
        return quantize_blocks(values, self.target, block_elements=self.block_elements)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DelayedScaler:
    """Quantizes a tensor with one scale, which :class:`AmaxHistory` computes from earlier iterations. Values too large
    for the scale are clamped."""

    target: Format
    scale: torch.Tensor
    """Scale with which tensors of the current iteration are quantized, as biased exponent, uint8 ``[1]``."""
    newest: torch.Tensor
    """Largest magnitude of all tensors quantized in the current iteration so far, FP32 ``[1]``."""

    def quantize(self, values: torch.Tensor) -> QuantizedTensor:
        """Quantize ``values`` with the scale of the current iteration. Record their largest magnitude in ``newest``."""
        # A maximum does not change if a forward pass is recomputed, or if microbatches are processed in another order.
        amax = largest_finite(values.to(torch.float32).reshape(1, values.numel()))
        torch.maximum(self.newest, amax.detach(), out=self.newest)
        return quantize_tensor(values, self.target, self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """FP8 formats and scaling of a linear layer's weight, input and output gradient. Formats are E4M3. With
    ``is_hybrid``, output gradients are E5M2, which has a larger range."""

    scaling: str
    """Kind of scaling: ``tensorwise``, ``blockwise``, ``delayed`` or ``mxfp8``."""
    is_hybrid: bool = True
    formats: dict[str, Format] = field(init=False, hash=False, compare=False)
    """Format of each role (``weight``, ``input``, ``output_gradient``)."""

    def __post_init__(self) -> None:
        formats = {"weight": E4M3, "input": E4M3, "output_gradient": E5M2 if self.is_hybrid else E4M3}
        object.__setattr__(self, "formats", formats)

    def scaler(self, role: str) -> Scaler:
        """Make the scaler of one ``role`` of a layer, for tensorwise or blockwise scaling, which need no history.

        Raises:
            ValueError: the scaling is not ``tensorwise`` or ``blockwise``; for ``delayed``, use :class:`AmaxHistory`.
        """
        target = self.formats[role]
        if self.scaling == "tensorwise":
            return TensorwiseScaler(target=target)
        if self.scaling == "blockwise":
            return BlockwiseScaler(target=target)
        raise ValueError(f"scaling={self.scaling}: must be tensorwise or blockwise")


class AmaxHistory:
    """Scales of delayed scaling for several linear layers, and the magnitudes from which scales are computed.

    All tensors of one role (e.g. ``weight``) of one layer have the same scale in an iteration. This scale is computed
    from the largest magnitudes (amax) of earlier iterations. Ranks that process different tokens with the same layer
    must all-reduce ``newest`` with a maximum before they call ``advance``.

    Args:
        recipe: formats of the roles; its scaling must be ``delayed``.
        history: largest magnitudes of the latest iterations, newest first, FP32 ``[iterations, layers, roles]``; zeros
            before the first iteration. It belongs to the training state, because scales depend on it. Changed in place.
    """

    def __init__(self, recipe: Recipe, history: torch.Tensor) -> None:
        assert history.dim() == 3 and history.shape[2] == len(ROLES), f"history has the shape {tuple(history.shape)}"
        self.recipe = recipe
        self.history = history
        self.newest = torch.zeros_like(history[0])
        """Largest magnitudes in the current iteration so far, FP32 ``[layers, roles]``."""
        self.scales = torch.empty(history.shape[1:], dtype=torch.uint8, device=history.device)
        """Scale of each role of each layer in the current iteration."""
        self.begin()

    @classmethod
    def of(
        cls, recipe: Recipe, *, num_iterations: int, num_layers: int = 1, device: torch.device | str = "cpu"
    ) -> "AmaxHistory":
        """Make an empty history. The scales of the first iteration are 1, as in Transformer Engine."""
        return cls(recipe, torch.zeros((num_iterations, num_layers, len(ROLES)), device=device))

    def begin(self) -> None:
        """Begin an iteration: compute its scales from ``history``. Discard magnitudes of an unfinished iteration."""
        self.newest.zero_()
        amax = self.history.amax(dim=0)
        for place, role in enumerate(ROLES):
            self.scales[:, place] = scales_for(amax[:, place], self.recipe.formats[role])

    def advance(self) -> None:
        """Add the magnitudes of the finished iteration to ``history``."""
        self.history.copy_(torch.cat([self.newest[None], self.history[:-1]]))

    def scaler(self, role: str, number: int = 0) -> Scaler:
        """Return the scaler of one ``role`` of layer ``number``. It uses views of ``scales`` and ``newest``."""
        place = ROLES.index(role)
        return DelayedScaler(
            target=self.recipe.formats[role],
            scale=self.scales[number, place : place + 1],
            newest=self.newest[number, place : place + 1],
        )

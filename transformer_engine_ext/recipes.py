"""Scaling recipes: which elements share a scale, and from which values the scale is computed."""

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


class Scaler(Protocol):
    """Quantizes the tensors of one role (a weight, an input, an output gradient) of one layer."""

    def quantize(self, values: torch.Tensor) -> QuantizedTensor:
        """Quantize FP32, BF16 or FP16 ``values`` of any shape."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that later results depend on, as views. They must be captured with the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorwiseScaler:
    """One scale for the tensor, from its own largest magnitude ("current scaling"). It has no state."""

    target: Format

    def quantize(self, values: torch.Tensor) -> QuantizedTensor:
        """Quantize ``values``; no finite value is clamped."""
        amax = largest_finite(values.to(torch.float32).reshape(1, values.numel()))
        return quantize_tensor(values, self.target, scales_for(amax, self.target))

    def state(self) -> dict[str, torch.Tensor]:
        """Return no tensor: the scale follows from the values."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseScaler:
    """One scale for each block of consecutive elements, from the block's largest magnitude. It has no state."""

    target: Format
    block_elements: int = BLOCK_ELEMENTS

    def quantize(self, values: torch.Tensor) -> QuantizedTensor:
        """Quantize ``values``; no finite value is clamped."""
        return quantize_blocks(values, self.target, block_elements=self.block_elements)

    def state(self) -> dict[str, torch.Tensor]:
        """Return no tensor: the scales follow from the values."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DelayedScaler:
    """One scale for the tensor, from the largest magnitudes of earlier tensors. Larger values are clamped.

    The history belongs to the training state. A replay without it computes other codes.
    """

    target: Format
    history: torch.Tensor
    """Largest magnitudes of the newest tensors, newest first, FP32 ``[length]``; zeros before the first tensor."""

    @classmethod
    def of(cls, target: Format, length: int, device: torch.device | str = "cpu") -> "DelayedScaler":
        """Make a scaler with an empty history of ``length`` tensors."""
        return cls(target=target, history=torch.zeros(length, dtype=torch.float32, device=device))

    def quantize(self, values: torch.Tensor) -> QuantizedTensor:
        """Quantize ``values`` with the scale of the history, and add their largest magnitude to the history. Before the
        first tensor the scale is 1, as in Transformer Engine."""
        found = quantize_tensor(values, self.target, scales_for(self.history.amax(dim=0, keepdim=True), self.target))
        newest = largest_finite(values.to(torch.float32).reshape(1, values.numel()))
        self.history.copy_(torch.cat([newest, self.history[:-1]]))
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """Return the history."""
        return {"amax_history": self.history}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Formats and scaling of the three operands of a layer. ``hybrid`` is E4M3 for weights and inputs, and E5M2 for
    output gradients, which have a larger range."""

    scaling: str
    """``tensorwise``, ``blockwise``, ``delayed`` or ``mxfp8``."""
    is_hybrid: bool = True
    amax_history_length: int = 16
    """Number of tensors in the history of ``delayed``."""
    formats: dict[str, Format] = field(init=False, hash=False, compare=False)
    """Format of each role: ``weight``, ``input`` and ``output_gradient``."""

    def __post_init__(self) -> None:
        formats = {"weight": E4M3, "input": E4M3, "output_gradient": E5M2 if self.is_hybrid else E4M3}
        object.__setattr__(self, "formats", formats)

    def scaler(self, role: str, device: torch.device | str = "cpu") -> Scaler:
        """Make the scaler of one ``role`` of a layer.

        Raises:
            ValueError: the scaling is unknown here. Ask ``Provider.refusal`` first.
        """
        target = self.formats[role]
        if self.scaling == "tensorwise":
            return TensorwiseScaler(target=target)
        if self.scaling == "blockwise":
            return BlockwiseScaler(target=target)
        if self.scaling == "delayed":
            return DelayedScaler.of(target, self.amax_history_length, device)
        raise ValueError(f"scaling={self.scaling}: must be tensorwise, blockwise or delayed")

"""``QuantizedTensor``: a tensor stored as codes of a low-precision number format and power-of-two scales.

A scale is stored as one byte: the biased exponent (E8M0). Multiplying a code by a power of two is exact. So decoded FP8
values have at most four significant bits, and BF16 holds them exactly.
"""

import math
from dataclasses import dataclass

import torch

from transformer_engine_ext.formats import FORMATS, Draws, Format, cast, cast_stochastically, power_of_two

BLOCK_ELEMENTS = 64
"""Number of consecutive elements of a flattened tensor that share a scale in blockwise scaling.

Megatron starts each parameter at a multiple of 64 elements of its buffer. If shards also start at multiples of 64, no
block is divided between shards, and scales do not depend on the number of shards."""

_BIAS = 127
_LEAST = 1
# A smaller exponent is clamped: both 2**e and 2**-e must be normal FP32 numbers.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedTensor:
    """A tensor that is stored as codes and scales. Copies, views and conversions to bytes and back keep the codes."""

    codes: torch.Tensor
    """Values of the tensor divided by their scales, in the low-precision dtype and the shape of the tensor."""
    scales: torch.Tensor
    """Scales as biased exponents, uint8: one for the whole tensor, or one for each block of the flattened tensor. Empty
    if the codes have no scales."""
    block_elements: int | None
    """Number of elements that share a scale; None if there is one scale for the whole tensor."""

    @property
    def format(self) -> Format:
        """Number format of the codes."""
        return FORMATS[str(self.codes.dtype).removeprefix("torch.")]

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.codes.shape

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def factors(self) -> torch.Tensor:
        """Scales as FP32 numbers, by which codes are multiplied, in the shape of ``scales``."""
        return factors_of(self.scales)

    def decode(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Multiply the codes by their scales, in ``dtype``. FP32 is exact for all codes, and BF16 for FP8 codes."""
        values = self.codes.to(torch.float32)
        if self.scales.numel() == 0:
            return values.to(dtype)
        if self.block_elements is None:
            return (values * self.factors.reshape(())).to(dtype)
        rows = to_blocks(values.reshape(-1), self.block_elements)
        return (rows * self.factors[:, None]).reshape(-1)[: values.numel()].reshape(values.shape).to(dtype)

    def copy_(self, other: "QuantizedTensor") -> None:
        """Copy codes and scales of ``other`` into this tensor's memory, so that views of this tensor stay valid."""
        assert (self.format, self.shape, self.scales.shape) == (other.format, other.shape, other.scales.shape), (
            f"{other.format.name} {tuple(other.shape)} does not fit {self.format.name} {tuple(self.shape)}"
        )
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)

    def equal(self, other: "QuantizedTensor") -> bool:
        """Return whether this tensor and ``other`` have equal formats, shapes, and bits of codes and scales."""
        return (
            (self.format, self.shape, self.block_elements) == (other.format, other.shape, other.block_elements)
            # ``torch.equal`` does not accept float8, and it would call a NaN different from itself.
            and torch.equal(byte_view(self.codes), byte_view(other.codes))
            and torch.equal(self.scales, other.scales)
        )


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous ``tensor`` as a flat uint8 view of its memory."""
    assert tensor.is_contiguous(), "only a contiguous tensor has a flat view"
    return tensor.detach().reshape(-1).view(torch.uint8)


def to_blocks(flat: torch.Tensor, block_elements: int = BLOCK_ELEMENTS) -> torch.Tensor:
    """Return ``flat [elements]`` as ``[blocks, block_elements]``. Zeros fill the last block if it is not full."""
    missing = -flat.numel() % block_elements
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(-1, block_elements)


def num_blocks(num_elements: int, block_elements: int = BLOCK_ELEMENTS) -> int:
    """Return into how many blocks ``num_elements`` elements are divided. Each block has one scale."""
    return -(-num_elements // block_elements)


def largest_finite(values: torch.Tensor) -> torch.Tensor:
    """Return the largest finite magnitude (amax) of each row of ``values [rows, elements]``, FP32 ``[rows]``. Return
    zero for a row without finite values. NaN and infinity are left out, because a scale computed from them would
    destroy all values of the block."""
    if values.shape[1] == 0:
        return values.new_zeros(values.shape[0])
    return values.abs().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1)


def scales_for(amax: torch.Tensor, target: Format) -> torch.Tensor:
    """Return the smallest power-of-two scale for each finite FP32 number in ``amax``, as biased exponent (uint8).

    ``amax`` divided by its scale is at most ``target.largest``. If ``amax`` is zero, the scale is 1. Scales are limited
    so that FP32 can hold every decoded value; so quantizing clamps magnitudes near the largest FP32 number.
    """
    _, exponent = torch.frexp(amax)
    of_largest = math.frexp(target.largest)[1]
    # With amax = m * 2**e, largest = n * 2**f, m and n in [0.5, 1): the scale is 2**(e - f), or twice that if m > n.
    biased = (exponent - of_largest + _BIAS).clamp(min=_LEAST)
    is_too_small = amax * inverse_factors_of(biased) > target.largest
    most = 2 * _BIAS + 1 - of_largest  # with this scale, the largest decoded value is n * 2**128, which FP32 can hold
    return torch.where(amax == 0.0, _BIAS, (biased + is_too_small).clamp(max=most)).to(torch.uint8)


def factors_of(scales: torch.Tensor) -> torch.Tensor:
    """Return 2**(scale - 127) as FP32 for each of ``scales`` (biased exponents)."""
    return power_of_two(scales.to(torch.int32) - _BIAS)


def inverse_factors_of(scales: torch.Tensor) -> torch.Tensor:
    """Return 2**(127 - scale) as FP32 for each of ``scales`` (biased exponents)."""
    return power_of_two(_BIAS - scales.to(torch.int32))


def quantize_tensor(values: torch.Tensor, target: Format, scale: torch.Tensor) -> QuantizedTensor:
    """Quantize ``values`` with one ``scale`` for all (uint8 ``[1]``). Values too large for the scale are clamped."""
    # A factor of shape [1] would add a dimension to a tensor that has none.
    codes = cast(values.to(torch.float32) * inverse_factors_of(scale).reshape(()), target)
    return QuantizedTensor(codes=codes, scales=scale, block_elements=None)


def quantize_blocks(
    values: torch.Tensor,
    target: Format,
    *,
    block_elements: int = BLOCK_ELEMENTS,
    draws: Draws | None = None,
    start: int = 0,
    keeps_nonzero: bool = False,
) -> QuantizedTensor:
    """Quantize FP32 ``values`` of any shape with one scale for each block of the flattened tensor.

    Args:
        draws: random numbers for stochastic rounding; None rounds to nearest.
        start: index of the first of ``values`` in the flattened parameter; a multiple of ``block_elements``.
        keeps_nonzero: whether values above zero become at least the smallest positive value of the format. AdamW needs
            this for the second moment: with zero, it would divide the first moment by epsilon alone.
    """
    assert start % block_elements == 0, f"element {start} is inside a block of {block_elements} elements"
    if not target.is_scaled:
        return QuantizedTensor(
            codes=values.to(target.dtype, copy=True),
            scales=torch.empty(0, dtype=torch.uint8, device=values.device),
            block_elements=block_elements,
        )
    flat = values.to(torch.float32).reshape(-1)
    rows = to_blocks(flat, block_elements)
    scales = scales_for(largest_finite(rows), target)
    scaled = (rows * inverse_factors_of(scales)[:, None]).reshape(-1)[: flat.numel()]
    if keeps_nonzero:
        scaled = torch.where((flat > 0.0) & (scaled < target.smallest), target.smallest, scaled)
    if draws is None:
        codes = cast(scaled, target)
    else:
        codes = cast_stochastically(scaled, target, draws.bits(start, flat.numel(), flat.device))
    return QuantizedTensor(codes=codes.view(values.shape), scales=scales, block_elements=block_elements)

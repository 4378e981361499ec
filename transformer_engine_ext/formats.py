"""Number formats of low-precision state, and casts to these formats. A cast clamps values first and never makes a NaN.

A cast takes FP32 values that are already divided by their scale. Its result has the same bits on every device and for
every number of threads, as a cast consists of operations that IEEE 754 or integer arithmetic defines exactly.
"""

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A floating-point format in which state is stored."""

    name: str
    """Name of the format's dtype in torch, e.g. ``float8_e4m3fn``."""
    largest: float
    """Largest magnitude that the format can store. Larger magnitudes are clamped to it."""
    mantissa_bits: int
    """Number of stored bits of the significand."""
    min_exponent: int
    """Exponent of the format's smallest normal value."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the format in torch."""
        found = getattr(torch, self.name)
        assert isinstance(found, torch.dtype), f"torch.{self.name} is no dtype"
        return found

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored value."""
        return self.dtype.itemsize

    @property
    def is_scaled(self) -> bool:
        """Whether stored values have scales. FP32 needs none."""
        return self.name != "float32"

    @property
    def smallest(self) -> float:
        """Smallest magnitude above zero that the format can store."""
        return float(2.0 ** (self.min_exponent - self.mantissa_bits))


E4M3 = Format(name="float8_e4m3fn", largest=448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = Format(name="float8_e5m2", largest=57344.0, mantissa_bits=2, min_exponent=-14)
FP16 = Format(name="float16", largest=65504.0, mantissa_bits=10, min_exponent=-14)
FP32 = Format(name="float32", largest=torch.finfo(torch.float32).max, mantissa_bits=23, min_exponent=-126)

FORMATS = {found.name: found for found in (E4M3, E5M2, FP16, FP32)}
"""All formats, by the name of their torch dtype."""


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2**exponent as FP32, for each integer from -126 to 127 in ``exponent``. The result is exact. The result of
    ``torch.ldexp`` is not exact on every device."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def cast(values: torch.Tensor, target: Format) -> torch.Tensor:
    """Round FP32 ``values`` of any shape to the nearest value of the format ``target``, ties to even.

    Infinite and too large values become the largest value of the format, with their sign. Values below half of its
    smallest positive value become zero. NaN stays NaN, and no other value becomes NaN.
    """
    # Without the clamp, the result of an overflow depends on the version of torch: NaN, infinity or the largest value.
    return values.clamp(-target.largest, target.largest).to(target.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Random numbers for stochastic rounding. The random number of an element depends only on seed, parameter name,
    iteration and the element's index in the parameter. So it does not depend on how a parameter is cut into shards."""

    seed: int
    name: str
    """Global name of the parameter."""
    iteration: int

    @property
    def key(self) -> int:
        """Digest of seed, iteration and parameter name, as int64: the seed of the random numbers of all elements."""
        digest = hashlib.blake2b(f"{self.seed}/{self.iteration}/{self.name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def bits(self, start: int, count: int, device: torch.device) -> torch.Tensor:
        """Return 32 random bits for each of the elements [start, start + count) of the flattened parameter, as int64
        ``[count]``."""
        # SplitMix64 (Steele, Lea and Flood, 2014): a counter and a finalizer. Products in int64 wrap as in uint64.
        mixed = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
        mixed = mixed * _signed(0x9E3779B97F4A7C15) + self.key
        mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
        return _shifted(mixed ^ _shifted(mixed, 31), 32)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    # int64 shifts copy the sign bit; the mask removes the copies.
    return (values >> count) & ((1 << (64 - count)) - 1)


def cast_stochastically(values: torch.Tensor, target: Format, bits: torch.Tensor) -> torch.Tensor:
    """Round FP32 ``values`` stochastically to a neighbouring number of the format ``target``.

    The closer a neighbour, the more probable it is, so that the expected result is the value. Probabilities are exact
    for normal numbers of ``target``; smaller values lose bits below 2**(min_exponent - 23). NaN stays NaN, and too
    large values are clamped, as in ``cast``.

    Args:
        bits: 32 random bits for each value, int64, in the shape of ``values``.
    """
    assert target.is_scaled, f"{target.name}: values are not rounded"
    clamped = values.clamp(-target.largest, target.largest)
    is_nan = clamped.isnan()
    magnitude = clamped.abs().masked_fill(is_nan, 0.0)
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2**exponent with m in [0.5, 1)
    spacing = (exponent - 1).clamp(min=target.min_exponent) - target.mantissa_bits
    # In units of spacing / 2**fraction_bits, a magnitude is below 2**24. A normal one is an integer: no bit is lost.
    fraction_bits = 23 - target.mantissa_bits
    fixed = (magnitude * power_of_two(fraction_bits - spacing)).to(torch.int64)
    rounded = (fixed + (bits >> (32 - fraction_bits))) >> fraction_bits
    found = rounded.to(torch.float32) * power_of_two(spacing)
    return torch.where(is_nan, clamped, torch.copysign(found, clamped)).to(target.dtype)

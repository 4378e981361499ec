"""Packs tensors of any dtype into one buffer of bytes, with a header of names, dtypes and shapes, and unpacks them.

Bytes are copied unchanged. Quantized tensors are not decoded, so compute weights are restored with the same bits.
(Decoding to BF16 and quantizing again can choose other scales and so other codes.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine_ext.quantized import BLOCK_ELEMENTS, QuantizedTensor, byte_view

ALIGNMENT_BYTES = 64
"""Each packed tensor starts at a multiple of this number of bytes, as views of the buffer need aligned addresses."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.int64,
        torch.uint8,
    )
}


class CodecError(ValueError):
    """Raised if packed bytes or their header are invalid, so that no tensors can be made from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Entry of the header for one packed tensor: its name, dtype, shape and offset in the buffer."""

    name: str
    dtype: str
    """Name of the tensor's dtype in torch, e.g. ``float16``."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte in the buffer."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def to_json(self) -> list[Any]:
        """Return the entry as a JSON value."""
        return [self.name, self.dtype, list(self.shape), self.offset]

    @classmethod
    def from_json(cls, content: Any) -> "Entry":
        """Make an entry from the result of ``to_json``, and check it.

        Raises:
            CodecError: a value has a wrong type or is out of range.
        """
        if not isinstance(content, list) or len(content) != 4:
            raise CodecError(f"entry {content!r:.80}: must be a list of name, dtype, shape and offset")
        name, dtype, shape, offset = content
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in _DTYPES:
            raise CodecError(f"entry {name!r:.80}: dtype {dtype!r:.80} must be one of {', '.join(_DTYPES)}")
        numbers = [*shape, offset] if isinstance(shape, list) else [None]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise CodecError(f"entry {name:.80}: shape and offset must be integers of at least 0")
        return cls(name=name, dtype=dtype, shape=tuple(shape), offset=offset)


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Entry], int]:
    """Return the header entry of each tensor, in order, and the size in bytes of a buffer for all tensors."""
    entries, offset = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert dtype in _DTYPES, f"{name}: {dtype} has no dtype tag"
        entries.append(Entry(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset))
        offset += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return entries, offset


def pack(tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor | None = None) -> tuple[list[Entry], torch.Tensor]:
    """Copy contiguous ``tensors`` to a uint8 buffer. Return their header entries and the buffer.

    Args:
        buffer: uint8 ``[bytes]`` of at least the size that ``layout`` returns; None allocates a new buffer.
    """
    entries, num_bytes = layout(tensors)
    if buffer is None:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
    assert buffer.dtype is torch.uint8 and buffer.numel() >= num_bytes, f"the buffer must have {num_bytes} bytes"
    for entry in entries:
        source = byte_view(tensors[entry.name])
        buffer[entry.offset : entry.offset + source.numel()].copy_(source)
    return entries, buffer


def unpack(entries: Sequence[Entry], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the packed tensors by name, as views of ``buffer``.

    Raises:
        CodecError: an entry is outside of the buffer, is not aligned, overlaps the entry before, or repeats a name.
    """
    found: dict[str, torch.Tensor] = {}
    end = 0
    for entry in entries:
        if entry.name in found:
            raise CodecError(f"{entry.name:.80}: occurs twice")
        if entry.offset % ALIGNMENT_BYTES or entry.offset < end:
            raise CodecError(f"{entry.name:.80}: offset {entry.offset} is not aligned, or inside the previous tensor")
        end = entry.offset + entry.num_bytes
        if end > buffer.numel():
            raise CodecError(f"{entry.name:.80}: ends at byte {end}, but the buffer has {buffer.numel()} bytes")
        found[entry.name] = buffer[entry.offset : end].view(_DTYPES[entry.dtype]).view(entry.shape)
    return found


def parts_of(name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return two tensors: a quantized tensor's codes, named ``<name>``, and its scales, named ``<name>_scales``."""
    return {name: tensor.codes, f"{name}_scales": tensor.scales}


def from_parts(name: str, parts: Mapping[str, torch.Tensor], block_elements: int | None) -> QuantizedTensor:
    """Make a quantized tensor from the codes and scales that :func:`parts_of` returned, without copying them.

    Raises:
        CodecError: the number of scales does not fit the codes.
    """
    found = QuantizedTensor(codes=parts[name], scales=parts[f"{name}_scales"], block_elements=block_elements)
    wanted = 1 if block_elements is None else -(-found.codes.numel() // block_elements)
    if found.scales.dtype is not torch.uint8 or found.scales.numel() != (wanted if found.format.is_scaled else 0):
        raise CodecError(f"{name:.80}: {found.scales.numel()} scales do not fit {found.codes.numel()} codes")
    return found


def export(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, *, block_elements: int | None = BLOCK_ELEMENTS
) -> dict[str, torch.Tensor]:
    """Decode quantized state to plain tensors, for programs that cannot read codes and scales.

    A value is a code times its scale. FP32 holds every value exactly. BF16 holds the values of FP8 codes exactly, and
    rounds the values of FP16 and FP32 codes. The result is no checkpoint: quantizing the values again can choose other
    scales, and so other codes. The project's checkpoints therefore contain codes and scales.

    Args:
        parts: codes and scales by name, as :func:`parts_of` returns them, of any shape. Tensors of integers, such as
            the count of updates, are copied unchanged.
        dtype: ``torch.bfloat16`` or ``torch.float32``.
        block_elements: number of elements that share a scale; None if there is one scale for each tensor.

    Raises:
        CodecError: scales have no codes, FP8 codes have no scales, or the number of scales does not fit the codes.
    """
    assert dtype in (torch.bfloat16, torch.float32), f"{dtype}: values are exported as BF16 or FP32"
    values: dict[str, torch.Tensor] = {}
    for name, found in parts.items():
        if name.endswith("_scales"):
            if name.removesuffix("_scales") not in parts:
                raise CodecError(f"{name:.80}: scales are given without their codes; export both")
            continue
        scales = parts.get(f"{name}_scales")
        if scales is not None and scales.numel() > 0:
            values[name] = from_parts(name, parts, block_elements).decode(dtype)
        elif found.numel() > 0 and found.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise CodecError(f"{name:.80}: codes in {found.dtype} are given without their scales; export both")
        else:
            # FP16 compute weights and FP32 state have no scales. The copy keeps a later update out of the export.
            values[name] = found.to(dtype, copy=True) if found.is_floating_point() else found.clone()
    return values

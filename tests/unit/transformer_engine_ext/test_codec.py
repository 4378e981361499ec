"""Tests that packed state has its exact bytes and is not decoded, and that damaged headers are refused."""

import json

import pytest
import torch

from transformer_engine_ext.adamw import ScaledState
from transformer_engine_ext.codec import CodecError, Entry, from_parts, layout, pack, parts_of, unpack
from transformer_engine_ext.formats import E4M3, E5M2
from transformer_engine_ext.quantized import QuantizedTensor, byte_view, quantize_blocks
from transformer_engine_ext.regimes import REGIMES


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = ScaledState.of(REGIMES["fp8_fp8_fp8_fp16"], torch.randn(1000), name="w").parts()
    return {**found, "amax_history": torch.rand(16), "step": torch.tensor(3, dtype=torch.int64), "none": torch.empty(0)}


def test_a_round_trip_keeps_every_byte() -> None:
    tensors = state()
    # Codes that no cast makes, such as NaN and negative zero, are kept too.
    byte_view(tensors["master"])[:256] = torch.arange(256, dtype=torch.uint8)
    entries, buffer = pack(tensors)
    read = [Entry.from_json(row) for row in json.loads(json.dumps([entry.to_json() for entry in entries]))]
    assert read == entries
    found = unpack(read, buffer.clone())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert byte_view(found[name]).equal(byte_view(tensor)), name


def test_nothing_is_decoded_or_padded_beyond_the_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = state()
    monkeypatch.setattr(QuantizedTensor, "decode", lambda *_: pytest.fail("decoded"))
    entries, buffer = pack(tensors)
    unpack(entries, buffer)
    content = sum(tensor.nbytes for tensor in tensors.values())
    assert content <= buffer.numel() < content + 64 * len(tensors)


def test_unpacked_tensors_are_views_and_a_given_buffer_is_used() -> None:
    tensors = state()
    buffer = torch.zeros(layout(tensors)[1] + 100, dtype=torch.uint8)
    entries, used = pack(tensors, buffer)
    assert used is buffer
    found = unpack(entries, buffer)
    buffer.zero_()
    assert found["amax_history"].count_nonzero() == 0
    with pytest.raises(AssertionError, match="must have"):
        pack(tensors, torch.empty(10, dtype=torch.uint8))


def test_parts_are_the_tensors_themselves() -> None:
    found = quantize_blocks(torch.randn(130), E5M2)
    parts = parts_of("weight", found)
    assert parts["weight"] is found.codes and parts["weight_scales"] is found.scales
    assert from_parts("weight", parts, 64).equal(found)
    with pytest.raises(CodecError, match="2 scales do not fit 130 codes"):
        from_parts("weight", {**parts, "weight_scales": found.scales[:2]}, 64)


@pytest.mark.parametrize(
    "row",
    [
        "w",
        ["w", "float8_e4m3fn", [2]],
        [3, "float32", [2], 0],
        ["w", "float128", [2], 0],
        ["w", ["float32"], [2], 0],
        ["w", "float32", 2, 0],
        ["w", "float32", [-1], 0],
        ["w", "float32", [2.0], 0],
        ["w", "float32", [True], 0],
        ["w", "float32", [2], -64],
        ["w", "float32", [2**70], 0],
    ],
)
def test_a_damaged_header_is_refused(row: object) -> None:
    with pytest.raises(CodecError, match="entry"):
        Entry.from_json(row)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("a", (100,), 0)], "ends at byte 100"),
        ([("a", (2**40, 2**20), 0)], "ends at byte"),
        ([("a", (8,), 8)], "not aligned"),
        ([("a", (65,), 0), ("b", (1,), 64)], "inside the previous"),
        ([("a", (8,), 0), ("a", (8,), 64)], "occurs twice"),
    ],
)
def test_entries_outside_of_the_buffer_are_refused(rows: list[tuple[str, tuple[int, ...], int]], says: str) -> None:
    entries = [Entry(name=name, dtype=E4M3.name, shape=shape, offset=offset) for name, shape, offset in rows]
    with pytest.raises(CodecError, match=says):
        unpack(entries, torch.zeros(80, dtype=torch.uint8))

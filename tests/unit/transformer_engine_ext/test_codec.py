"""Tests that packed state has its exact bytes and is not decoded, and that damaged headers are refused."""

import json

import pytest
import torch

from transformer_engine_ext.adamw import ScaledState
from transformer_engine_ext.codec import CodecError, Entry, export, from_parts, layout, pack, parts_of, unpack
from transformer_engine_ext.formats import E4M3, E5M2
from transformer_engine_ext.quantized import QuantizedTensor, byte_view, quantize_blocks
from transformer_engine_ext.recipes import TensorwiseScaler
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


@pytest.mark.parametrize("name", REGIMES)
def test_an_export_has_the_values_of_codes_times_scales(name: str) -> None:
    torch.manual_seed(1)
    state = ScaledState.of(REGIMES[name], torch.randn(1000) * torch.logspace(-6, 3, 1000), name="w")
    weight = state.compute_weights()
    parts = {**state.parts(), **parts_of("weight", weight), "step": torch.tensor(3)}
    exact, short = export(parts, torch.float32), export(parts, torch.bfloat16)
    assert exact.keys() == short.keys() == {"master", "exp_avg", "exp_avg_sq", "weight", "step"}
    assert exact["step"].dtype is torch.int64 and exact["step"] is not parts["step"]
    for kind, tensor in (("master", state.master), ("weight", weight)):
        factors = 1.0 if tensor.scales.numel() == 0 else tensor.factors.repeat_interleave(64)[:1000]
        assert exact[kind].equal(tensor.codes.to(torch.float32) * factors)
        assert short[kind].equal(exact[kind].to(torch.bfloat16))
        assert tensor.format is not E4M3 or short[kind].to(torch.float32).equal(exact[kind])
    assert not any(found.data_ptr() == parts[kind].data_ptr() for kind, found in exact.items())


def test_an_export_of_tensorwise_codes_keeps_shapes() -> None:
    found = TensorwiseScaler(target=E4M3).quantize(torch.randn(12, 10))
    values = export(parts_of("weight", found), torch.bfloat16, block_elements=None)["weight"]
    assert values.shape == (12, 10) and values.equal(found.decode(torch.bfloat16))


def test_codes_or_scales_alone_are_not_exported() -> None:
    parts = parts_of("weight", quantize_blocks(torch.randn(130), E4M3))
    for missing, says in (
        ("weight", "given without their codes"),
        ("weight_scales", "given without their scales; export both"),
    ):
        with pytest.raises(CodecError, match=says):
            export({name: part for name, part in parts.items() if name != missing}, torch.float32)
    with pytest.raises(CodecError, match="3 scales do not fit 120 codes"):
        export({**parts, "weight": parts["weight"][:120]}, torch.float32)
    with pytest.raises(AssertionError, match="exported as BF16 or FP32"):
        export(parts, torch.float16)

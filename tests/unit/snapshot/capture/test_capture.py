"""Tests that slices are copied completely during the computation, and then reported to the snapshot server."""

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from megatron_ft.errors import ControlError
from megatron_ft.operators import Component, OperatorId, StateShard
from megatron_ft.planning.snapshot.plan import Piece, Unit, WindowPlan, window_bytes
from megatron_ft.snapshot.capture.capture import CopyBatch, WindowCapture, _ThreadCopier
from megatron_ft.snapshot.window import Slice

FULL = tuple(Component(name=name, dtype="float32", item_bytes=4) for name in ("master", "exp_avg"))
FROZEN = (Component(name="weight", dtype="bfloat16", item_bytes=2),)
OPERATORS = [OperatorId(layer=layer, kind="non_expert") for layer in (1, 2, 3)]


class RecordingClient:
    def __init__(self) -> None:
        self.output: list[tuple[Any, ...]] = []

    def begin(self, buffer: int, *, start_iteration: int, num_slices: int, plan: Mapping[str, Any]) -> None:
        self.output.append(("begin", buffer, start_iteration, num_slices))

    def captured(self, buffer: int, index: int, part: Slice) -> None:
        assert part.hashes is None
        self.output.append(("captured", buffer, index, part.iteration, part.header, part.offset))


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    named = {}
    for operator in OPERATORS:
        name = f"decoder.layers.{operator.layer - 1}.w"
        named |= {f"{name}/{part.name}": torch.randn(100) for part in FULL}
        named[f"{name}/weight"] = torch.randn(100).bfloat16()
    return named


def capture_of(
    state: dict[str, torch.Tensor],
) -> tuple[WindowCapture, list[torch.Tensor], RecordingClient, _ThreadCopier]:
    shards = [
        StateShard(
            operator=operator,
            parameter=f"decoder.layers.{operator.layer - 1}.w",
            tensor_part=0,
            start=0,
            stop=100,
            full=FULL,
            frozen=FROZEN,
        )
        for operator in OPERATORS
    ]
    plan = WindowPlan(slices=tuple((Unit(operator=operator),) for operator in OPERATORS), interval_iterations=3)
    buffers = [torch.zeros(window_bytes(plan, shards), dtype=torch.uint8) for _ in range(3)]
    client, copier = RecordingClient(), _ThreadCopier()

    def source(piece: Piece) -> torch.Tensor:
        return state[f"{piece.parameter}/{piece.component}"][piece.start : piece.stop]

    return (
        WindowCapture(plan, shards, client=client, copier=copier, buffers=buffers, source=source),
        buffers,
        client,
        copier,
    )


def test_a_window_holds_what_the_state_was_at_each_slice(state: dict[str, torch.Tensor]) -> None:
    capture, buffers, client, copier = capture_of(state)
    kept = []
    for index in range(3):
        capture.begin_slice(1, index, iteration=7 + index, header=partial(dict, vote=index))
        capture.settle()
        kept.append({name: tensor.clone() for name, tensor in state.items()})
        for tensor in state.values():
            tensor.mul_(2)
    for index, part in enumerate(capture._slices):
        components = [piece.component for piece in part.pieces]
        assert components == ["master", "exp_avg"] + ["weight"] * (2 - index)
        for piece in part.pieces:
            raw = buffers[1].narrow(0, part.offset + piece.offset, piece.num_bytes)
            wanted = kept[index][f"{piece.parameter}/{piece.component}"]
            assert torch.equal(raw.view(wanted.dtype), wanted)
    offsets = [part.offset for part in capture._slices]
    captured = [("captured", 1, index, 7 + index, {"vote": index}, offsets[index]) for index in range(3)]
    assert client.output == [("begin", 1, 7, 3), *captured]
    assert not buffers[0].any() and not buffers[2].any()
    assert capture.figures.num_slices == 3 and capture.figures.num_bytes == 3 * 800 + 3 * 200
    copier.close()


def test_a_thousand_states_are_each_captured_whole_although_they_change_at_once(state: dict[str, torch.Tensor]) -> None:
    capture, buffers, _, copier = capture_of(state)
    part = capture._slices[0]
    for trial in range(1000):
        for tensor in state.values():
            tensor.fill_(trial)
        capture.begin_slice(0, 0, iteration=trial, header=dict)
        capture.settle()
        for tensor in state.values():
            tensor.fill_(-1)
        for piece in part.pieces:
            dtype = torch.bfloat16 if piece.component == "weight" else torch.float32
            raw = buffers[0].narrow(0, part.offset + piece.offset, piece.num_bytes).view(dtype)
            assert torch.equal(raw, torch.full_like(raw, trial))
    copier.close()


def test_settling_without_a_slice_is_nothing(state: dict[str, torch.Tensor]) -> None:
    capture, _, client, copier = capture_of(state)
    capture.settle()
    assert not client.output and capture.figures.num_slices == 0
    copier.close()


def test_sources_that_cannot_be_copied_as_they_are_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot copy"):
        CopyBatch.of([torch.zeros(4, 4).t()], [torch.zeros(64, dtype=torch.uint8)])
    with pytest.raises(ValueError, match="cannot copy"):
        CopyBatch.of([torch.zeros(4)], [torch.zeros(12, dtype=torch.uint8)])


def test_the_server_knows_of_a_window_before_its_buffer_is_overwritten(state: dict[str, torch.Tensor]) -> None:
    capture, buffers, client, copier = capture_of(state)
    buffers[2].fill_(7)
    seen = []
    begin = client.begin
    client.begin = lambda *args, **named: (seen.append(bool((buffers[2] == 7).all())), begin(*args, **named))
    capture.begin_slice(2, 0, iteration=4, header=dict)
    capture.settle()
    assert seen == [True] and not bool((buffers[2] == 7).all())
    copier.close()


@pytest.mark.parametrize("call", ["begin", "captured"])
def test_an_error_of_the_server_is_raised_once_and_before_the_update(state: dict[str, torch.Tensor], call: str) -> None:
    capture, _, client, copier = capture_of(state)

    def refuse(*args: Any, **named: Any) -> None:
        raise ControlError("the connection was lost")

    setattr(client, call, refuse)
    capture.begin_slice(0, 0, iteration=1, header=dict)
    with pytest.raises(ControlError, match="the connection was lost"):
        capture.settle()
    capture.settle()
    assert capture.figures.num_slices == 0
    copier.close()


def test_the_header_is_encoded_after_the_copy_and_not_by_the_training_thread(state: dict[str, torch.Tensor]) -> None:
    capture, buffers, client, copier = capture_of(state)
    state["decoder.layers.0.w/master"].fill_(3)
    threads = []

    def header() -> dict[str, str]:
        threads.append(threading.current_thread())
        return {"first": str(float(buffers[0][:4].view(torch.float32)[0]))}

    capture.begin_slice(0, 0, iteration=1, header=header)
    capture.settle()
    assert threads != [threading.current_thread()] and client.output[-1][4] == {"first": "3.0"}
    copier.close()

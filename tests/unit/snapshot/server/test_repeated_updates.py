"""Tests that a peer computes the state of parameters from their gradients, with the bits of the sender."""

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import Piece, align
from megatron_ft.snapshot.server.client import REPLICATED_BYTES, REPLICATED_START, Arena, KeeperClient
from megatron_ft.snapshot.server.peer_session import PeerSessions, announce
from megatron_ft.snapshot.server.store import Memory, Store
from megatron_ft.snapshot.server.wire import Refused
from megatron_ft.snapshot.window import Gradient, Slice, Update
from megatron_ft.testing.snapshot_servers import TOKEN, begin, cluster, fetch, wait_until
from tests.unit.snapshot.server.test_own_windows import new
from tests.unit.snapshot.server.test_peer_session import greeted

COMPONENTS = ("master", "exp_avg", "exp_avg_sq", "step")
SIZES = (1003, 37)
"""Elements of two parameters. Neither is a multiple of the width of vector instructions."""
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def pieces() -> tuple[Piece, ...]:
    found, offset = [], 0
    for number, size in enumerate(SIZES):
        for component in COMPONENTS:
            num_bytes = 4 if component == "step" else 4 * size
            found.append(Piece(f"p{number}", 0, component, "float32", 10, 10 + size, offset, num_bytes))
            offset = align(offset + num_bytes, 64)
    return tuple(found)


SLICE_BYTES = align(pieces()[-1].end)
GRADIENT_BYTES = sum(align(4 * size, 64) for size in SIZES)
WINDOW_BYTES = align(SLICE_BYTES + GRADIENT_BYTES, 4096)


class Training:
    """Two parameters that torch's AdamW updates, and their state as the bytes of a slice."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(1)
        self.parameters = [torch.randn(size, generator=self.random) for size in SIZES]
        self.optimizer = torch.optim.AdamW(self.parameters, **OPTIONS)  # type: ignore[arg-type]
        self.update()

    def update(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=self.random)
        self.optimizer.step()

    def slice_bytes(self) -> bytearray:
        payload = bytearray(SLICE_BYTES)
        for piece in pieces():
            parameter = self.parameters[int(piece.parameter[1:])]
            state = {"master": parameter, **self.optimizer.state[parameter]}
            payload[piece.offset : piece.end] = state[piece.component].numpy().tobytes()
        return payload

    def gradients(self) -> list[bytes]:
        return [parameter.grad.numpy().tobytes() for parameter in self.parameters if parameter.grad is not None]


def update_of(**changes: Any) -> Update:
    rows = tuple(Gradient(index, OPTIONS["lr"], OPTIONS["weight_decay"]) for index in (0, 4))  # type: ignore[arg-type]
    return replace(Update(betas=(0.9, 0.95), eps=1e-8, gradients=rows), **changes)


def slice_of(iteration: int, update: Update | None = None) -> Slice:
    header = {"vote": iteration}
    return Slice(iteration=iteration, offset=0, num_bytes=SLICE_BYTES, header=header, pieces=pieces(), update=update)


def capture(client: KeeperClient, arena: Arena, buffer: int, training: Training, part: Slice) -> None:
    begin(client, buffer, part.iteration, num_slices=1)
    memory = arena.buffer(buffer)
    memory[:SLICE_BYTES] = training.slice_bytes()
    if part.update is not None:
        for (start, stop), gradient in zip(part.update.ranges(part), training.gradients(), strict=True):
            memory[SLICE_BYTES + start : SLICE_BYTES + stop] = gradient
    client.captured(buffer, 0, part)


def replicated(arena: Arena, start: int) -> None:
    # The peer imports torch first, which takes long on a busy machine.
    wait_until(lambda: arena.status(REPLICATED_START) == start, f"window {start} is replicated", seconds=120.0)


def test_a_peer_computes_the_bits_of_the_sender_from_gradients() -> None:
    training = Training()
    with cluster(2) as nodes:
        client = nodes.client(0, node=0, peer_nodes=[1], send_gradients=True)
        arena = client.allocate(WINDOW_BYTES)
        for iteration in range(10, 18):
            # Peers have no earlier window at first, and in iteration 14 the rank does not offer an update.
            update = None if iteration == 14 else update_of()
            sent = arena.status(REPLICATED_BYTES)
            capture(client, arena, iteration % 3, training, slice_of(iteration, update))
            replicated(arena, iteration)
            client.committed(iteration)
            whole = iteration in (10, 14)
            assert arena.status(REPLICATED_BYTES) - sent == (SLICE_BYTES if whole else 4 * sum(SIZES))
            for node in range(2):
                assert fetch(client, 0, iteration, node=node) == [bytes(training.slice_bytes())]
            training.update()
        assert client.problems() == []


@pytest.mark.parametrize(
    "update",
    [
        pytest.param(update_of(betas=(0.8, 0.95)), id="betas"),
        pytest.param(update_of(eps=1e-3), id="eps"),
        pytest.param(update_of(gradients=(Gradient(0, 1e-3, 0.1), Gradient(4, 3e-3, 0.1))), id="learning rate"),
        pytest.param(update_of(gradients=(Gradient(0, 3e-3, 0.1), Gradient(4, 3e-3, 0.0))), id="weight decay"),
    ],
)
def test_a_result_with_other_bits_is_reported_and_the_state_is_sent(update: Update) -> None:
    training = Training()
    with cluster(2) as nodes:
        client = nodes.client(0, node=0, peer_nodes=[1])
        arena = client.allocate(WINDOW_BYTES)
        capture(client, arena, 0, training, slice_of(10))
        replicated(arena, 10)
        training.update()
        capture(client, arena, 1, training, slice_of(11, update))
        replicated(arena, 11)
        assert fetch(client, 0, 11, node=1) == [bytes(training.slice_bytes())]
        (problem,) = client.problems()
        assert problem["what"] == "replicate" and "differs from the sender's" in problem["error"]


def test_a_window_after_a_gap_is_sent_as_state() -> None:
    training = Training()
    with cluster(2) as nodes:
        client = nodes.client(0, node=0, peer_nodes=[1])
        arena = client.allocate(WINDOW_BYTES)
        for buffer, iteration in enumerate((10, 12)):
            sent = arena.status(REPLICATED_BYTES)
            capture(client, arena, buffer, training, slice_of(iteration, update_of()))
            replicated(arena, iteration)
            assert arena.status(REPLICATED_BYTES) - sent == SLICE_BYTES
            training.update()
        assert client.problems() == []


def test_pieces_of_an_earlier_iteration_are_not_updated() -> None:
    # The second parameter was not captured in iteration 11, so its state there is that of iteration 10.
    old = tuple(10 if piece.parameter == "p1" else 11 for piece in pieces())
    before, part = replace(slice_of(11), captured_at=old), slice_of(12, update_of())
    assert not part.repeats(before)
    first = replace(part, update=update_of(gradients=update_of().gradients[:1]))
    assert first.repeats(before) and first.repeats(slice_of(11)) and not first.repeats(slice_of(10))


def changed(index: int, **changes: Any) -> Slice:
    part = slice_of(11)
    part.pieces = tuple(
        piece._replace(**changes) if number == index else piece for number, piece in enumerate(part.pieces)
    )
    return part


@pytest.mark.parametrize(
    ("part", "update", "message"),
    [
        (slice_of(11), update_of(gradients=(Gradient(4, 0.1, 0.1), Gradient(0, 0.1, 0.1))), "ascending order"),
        (slice_of(11), update_of(gradients=(Gradient(0, 0.1, 0.1), Gradient(0, 0.1, 0.1))), "have valid piece indices"),
        (slice_of(11), update_of(gradients=(Gradient(8, 0.1, 0.1),)), "have valid piece indices"),
        (slice_of(11), update_of(gradients=(Gradient(-1, 0.1, 0.1),)), "have valid piece indices"),
        (slice_of(11), update_of(gradients=(Gradient(1, 0.1, 0.1),)), "one FP32 master weight"),
        (changed(3, component="weight"), update_of(), "must have the pieces master"),
        (changed(1, dtype="float16", num_bytes=2 * SIZES[0]), update_of(), "'exp_avg' of 'p0' must be FP32"),
        (changed(3, num_bytes=4 * SIZES[0]), update_of(), "'step' of 'p0' must be FP32"),
        (replace(slice_of(11), captured_at=(10,) * 8), update_of(), "must be FP32 and captured now"),
    ],
)
def test_an_update_that_does_not_fit_its_slice_is_refused(part: Slice, update: Update, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        update.check(part, 1 << 20)


def test_gradients_that_do_not_fit_the_window_are_refused() -> None:
    update_of().check(slice_of(11), SLICE_BYTES + GRADIENT_BYTES)
    window_bytes = SLICE_BYTES + 4 * SIZES[0]
    expected = f"need .* after the slice, which ends at byte {SLICE_BYTES}, but the window has {window_bytes} bytes$"
    with pytest.raises(CheckpointError, match=expected):
        update_of().check(slice_of(11), window_bytes)


@pytest.mark.parametrize(
    "change",
    [
        {"betas": [0.9]},
        {"betas": [0.9, float("nan")]},
        {"eps": -1.0},
        {"eps": "1"},
        {"gradients": [[0, 0.1]]},
        {"gradients": [[0, 0.1, -0.1]]},
        {"gradients": [["0", 0.1, 0.1]]},
        {"gradients": [{}]},
        {"more": 1},
    ],
)
def test_a_malformed_update_is_refused(change: dict[str, Any]) -> None:
    good = json.loads(json.dumps(update_of().to_json()))
    assert Update.from_json(good) == update_of()
    with pytest.raises(CheckpointError, match="update"):
        Update.from_json({**good, **change})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda about: about.pop("carries"), "update: must be sent only together with carries=true"),
        (lambda about: about["update"].update(eps=None), "eps"),
        (lambda about: about["update"].update(gradients=[[3, 0.1, 0.1]]), "one FP32 master weight"),
    ],
)
def test_a_peer_refuses_a_wrong_announcement(changes: Callable[[dict[str, Any]], object], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = greeted(listener, Store(0, TOKEN, Memory()), PeerSessions())
        window = replace(new(11, 0, 1), num_slices=1, slices=[slice_of(11)])
        about = {"waits": True, "carries": True, "update": update_of().to_json()}
        changes(about)
        wire.send({**announce(window, 0, 0, WINDOW_BYTES), **about})
        with pytest.raises(Refused, match=message):
            wire.answer()
        wire.close()


def test_a_peer_without_the_window_of_the_preceding_iteration_asks_for_the_state() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = greeted(listener, Store(0, TOKEN, Memory()), PeerSessions())
        window = replace(new(11, 0, 1), num_slices=1, slices=[slice_of(11)])
        about = {"waits": True, "carries": True, "update": update_of().to_json()}
        wire.send({**announce(window, 0, 0, WINDOW_BYTES), **about})
        assert wire.receive()["op"] == "go"
        wire.send_bytes(memoryview(np.zeros(4 * sum(SIZES), dtype=np.uint8)))
        with pytest.raises(Refused, match="the window of the preceding iteration is missing") as refused:
            wire.answer()
        assert refused.value.kind == "carry"
        wire.close()

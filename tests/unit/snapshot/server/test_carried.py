"""Tests windows that leave out pieces: the snapshot server and its peers copy these pieces from an earlier window."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.client import (
    COMMITTED_START,
    FAILED_START,
    HASHED_BYTES,
    REPLICATED_BYTES,
    Arena,
    KeeperClient,
)
from megatron_ft.snapshot.server.peer_session import PeerSessions, announce
from megatron_ft.snapshot.server.store import CarriedBytes, Memory, Store
from megatron_ft.snapshot.server.windows import HeldWindow, OwnWindows
from megatron_ft.snapshot.server.wire import Refused
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Slice, StoredLevel
from megatron_ft.testing.snapshot_servers import (
    PAGE,
    TOKEN,
    Cluster,
    begin,
    cluster,
    content,
    fetch,
    slice_of,
    wait_replicated,
    wait_until,
)
from tests.unit.snapshot.server.served import Served
from tests.unit.snapshot.server.test_own_windows import new
from tests.unit.snapshot.server.test_peer_session import greeted
from tests.unit.snapshot.server.test_sender import Peer

HALF = PAGE // 2


def partial(client: KeeperClient, arena: Arena, buffer: int, start: int, captured_at: tuple[int, int] | None) -> None:
    """Capture a window of one slice with two pieces, of which only those of iteration ``start`` are written."""
    begin(client, buffer, start, num_slices=1)
    for index, iteration in enumerate(captured_at or (start, start)):
        if iteration == start:
            place = slice(index * HALF, (index + 1) * HALF)
            arena.buffer(buffer)[place] = content(0, start, PAGE)[place]
    client.captured(buffer, 0, replace(slice_of(start), captured_at=captured_at))


def expected(first: int, second: int) -> list[bytes]:
    """Return the content of a window whose pieces were captured at iterations ``first`` and ``second``."""
    return [content(0, first, PAGE)[:HALF] + content(0, second, PAGE)[HALF:]]


def start(nodes: Cluster, *peers: int) -> tuple[KeeperClient, Arena]:
    client = nodes.client(0, node=0, peer_nodes=list(peers))
    return client, client.allocate(PAGE)


def test_pieces_are_copied_here_and_on_peers_and_not_sent() -> None:
    with cluster(3) as nodes:
        client, arena = start(nodes, 1, 2)
        history = [
            (10, None),
            (11, (10, 11)),
            (12, (12, 11)),
            (13, (12, 13)),
            (14, (12, 14)),
            (15, (12, 15)),
            (16, (16, 15)),
        ]
        for number, (iteration, captured_at) in enumerate(history):
            hashed, sent = arena.status(HASHED_BYTES), arena.status(REPLICATED_BYTES)
            partial(client, arena, number % 3, iteration, captured_at)
            wait_replicated(arena, iteration)
            client.committed(iteration)
            captured = PAGE if captured_at is None else HALF
            assert arena.status(HASHED_BYTES) - hashed == captured
            assert arena.status(REPLICATED_BYTES) - sent == 2 * captured, "each byte goes once to each peer"
            for node in range(3):
                assert fetch(client, 0, iteration, node=node) == expected(*(captured_at or (iteration, iteration)))
        assert client.problems() == []


def test_a_new_peer_gets_everything() -> None:
    with cluster(2) as nodes:
        client, arena = start(nodes, 1)
        partial(client, arena, 0, 10, None)
        wait_replicated(arena, 10)
        client.committed(10)
        nodes.nodes[1].kill()
        nodes.start(1)
        again = nodes.client(0, node=0, peer_nodes=[1])
        arena = again.allocate(PAGE)
        partial(again, arena, 1, 11, (10, 11))
        wait_replicated(arena, 11)
        assert fetch(again, 0, 11, node=1) == expected(10, 11)


def test_pieces_that_are_already_in_the_buffer_are_not_copied() -> None:
    windows = OwnWindows(PAGE)
    digests = {"decoder.a": ("0" * 32, "1" * 32)}["decoder.a"]

    def add(buffer: int, iteration: int, captured_at: tuple[int, int] | None) -> tuple[HeldWindow, Slice]:
        window = replace(new(iteration, buffer, 1), num_slices=1, slices=[])
        windows.begin(window)
        part = replace(slice_of(iteration), captured_at=captured_at)
        windows.capture(buffer, 0, part)
        return window, part

    sources = []
    for number, captured_at in enumerate([None, (10, 11), (10, 12), (10, 13), (14, 13), (14, 15)]):
        window, part = add(number % 3, 10 + number, captured_at)
        sources.append([(piece.index, piece.source) for piece in windows.carried(window, part)])
        part.hashes = digests
        if number:
            windows.commit(10 + number, 1)
    # Windows 11 and 12 copy piece 0; buffer 0 still has it for window 13. Windows 14 and 15 copy what changed in
    # between.
    assert sources == [[], [(0, 0)], [(0, 1)], [(0, None)], [(1, 0)], [(0, 1)]]


def test_a_window_whose_pieces_are_nowhere_is_given_up() -> None:
    with cluster(1) as nodes:
        client, arena = start(nodes)
        partial(client, arena, 0, 10, None)
        wait_replicated(arena, 10)
        partial(client, arena, 1, 11, (9, 11))
        wait_until(lambda: 11 in client.buffer_states().given_up.values(), "the window is given up")
        (problem,) = client.problems()
        assert problem["what"] == "carry"
        assert (
            "without 'master' of 'decoder.a', and no window in memory has this tensor's state of iteration 9"
            in problem["error"]
        )
        client.abandon(11)
        partial(client, arena, 1, 12, (10, 12))
        wait_replicated(arena, 12)
        assert fetch(client, 0, 12, node=0) == expected(10, 12)


def test_a_window_that_was_given_up_here_is_not_sent() -> None:
    with cluster(2) as nodes:
        client, arena = start(nodes, 1)
        partial(client, arena, 0, 10, None)
        wait_replicated(arena, 10)
        client.committed(10)
        partial(client, arena, 1, 11, (9, 11))
        wait_until(lambda: 11 in client.buffer_states().given_up.values(), "the window is given up")
        client.abandon(11)
        partial(client, arena, 1, 12, (10, 12))
        wait_replicated(arena, 12)
        assert fetch(client, 0, 12, node=1) == expected(10, 12)


def test_a_window_that_was_copied_from_damaged_memory_is_given_up() -> None:
    with cluster(1) as nodes:
        client, arena = start(nodes)
        partial(client, arena, 0, 10, None)
        wait_replicated(arena, 10)
        arena.buffer(0)[3:4] = b"\x01"
        partial(client, arena, 1, 11, (10, 11))
        wait_until(lambda: 11 in client.buffer_states().given_up.values(), "the window is given up")
        assert "has changed while it was copied" in client.problems()[0]["error"]


@pytest.fixture
def filling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, KeeperClient, threading.Event]]:
    """Yield a rank whose window 11 the hasher is filling with a piece of window 10, and the event that lets it go
    on."""
    has_begun, go_on, copy = threading.Event(), threading.Event(), CarriedBytes.copy

    def wait(piece: CarriedBytes, part: Slice, payload: memoryview) -> None:
        has_begun.set()
        assert go_on.wait(60), "timed out"
        copy(piece, part, payload)

    monkeypatch.setattr(CarriedBytes, "copy", wait)
    served = Served(tmp_path)
    client = served.client()
    arena = client.allocate(PAGE)
    partial(client, arena, 0, 10, None)
    wait_replicated(arena, 10)
    partial(client, arena, 1, 11, (10, 11))
    assert has_begun.wait(60), "timed out"
    yield served, client, go_on
    served.close()


def test_the_buffer_of_an_abandoned_window_is_given_back_after_it_was_filled(
    filling: tuple[Served, KeeperClient, threading.Event],
) -> None:
    served, client, go_on = filling
    windows = served.store.ranks[0].windows
    assert windows is not None
    with ThreadPoolExecutor(1) as pool:
        abandoned = pool.submit(client.abandon, 11)
        wait_until(lambda: len(list(windows)) == 1, "the window is dropped")
        is_early = abandoned.done()
        go_on.set()
        abandoned.result(60)
    assert not is_early, "the next window could begin in this buffer"
    client.close()


def test_memory_of_an_earlier_process_is_given_after_all_its_windows_were_filled(
    filling: tuple[Served, KeeperClient, threading.Event],
) -> None:
    served, earlier, go_on = filling
    client = served.client(generation=2)
    with ThreadPoolExecutor(1) as pool:
        allocated = pool.submit(client.allocate, PAGE)
        wait_until(lambda: served.store.ranks[0].allocating.locked() or allocated.done(), "the request has arrived")
        is_early = allocated.done()
        go_on.set()
        allocated.result(60)
    assert not is_early, "the next window could begin in the buffer of window 11"
    assert [entry.complete for entry in client.inventory(0)] == [True, True]
    earlier.close()
    client.close()


def test_a_peer_that_cannot_copy_gets_the_whole_window() -> None:
    """The peer claims to have the earlier window, but cannot copy from it."""
    peer = Peer()
    with cluster(1) as nodes:
        client = nodes.client(0, node=0, peer_nodes=[1], peers={"1": peer.address})
        arena = client.allocate(PAGE)
        partial(client, arena, 0, 10, None)
        peer.greet([])
        peer.take(0)
        peer.answer(op="ack")
        wait_replicated(arena, 10)
        partial(client, arena, 1, 11, (10, 11))
        message = peer.wire.receive(patient=True)
        assert message["carries"] is True
        peer.wire.receive_into(memoryview(bytearray(HALF)))
        assert len(peer.wire.receive()["hashes"]) == 2
        peer.answer(op="error", kind="carry", reason="it has changed")
        peer.wire.close()
        held = StoredWindow(start_iteration=10, generation=1, num_slices=1, num_held=1, where="copy", node=1, buffer=0)
        peer.greet([{"rank": 0, "window": asdict(held)}])
        message = peer.wire.receive(patient=True)
        assert message["carries"] is False and message["waits"] is True
        peer.wire.send({"op": "go"})
        payload = memoryview(bytearray(PAGE))
        peer.wire.receive_into(payload)
        assert [bytes(payload)] == expected(10, 11)
        assert len(peer.wire.receive()["hashes"]) == 2
        peer.answer(op="ack")
        wait_replicated(arena, 11)
        assert [problem["what"] for problem in client.problems()] == ["replicate"]
        peer.close()


def test_a_slice_without_its_earlier_window_is_refused_with_a_kind_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = Store(0, TOKEN, Memory())
        wire = greeted(listener, store, PeerSessions())
        part = replace(slice_of(11), captured_at=(10, 11))
        window = replace(new(11, 0, 1), num_slices=1, slices=[part])
        wire.send({**announce(window, 0, 0, PAGE), "waits": True, "carries": True})
        assert wire.receive()["op"] == "go"
        wire.send_bytes(memoryview(bytes(HALF)))
        with pytest.raises(
            Refused, match="without 'master' of .*, and no window in memory has this tensor's state"
        ) as refused:
            wire.answer()
        assert refused.value.kind == "carry" and isinstance(refused.value, ControlError)
        wire.close()


def stored(client: KeeperClient, arena: Arena, iteration: int, captured_at: tuple[int, int] | None) -> None:
    """Commit a window, and let its file have the pieces of iterations ``captured_at``; None for those in memory."""
    wait_replicated(arena, iteration)
    level = None
    if captured_at is not None:
        level = StoredLevel(captured_at=captured_at, header={"tokens_at_risk": json.dumps([list(captured_at)])})
    client.committed(iteration, is_written=True, level=level)


def test_a_file_has_earlier_pieces_than_memory(tmp_path: Path) -> None:
    with cluster(1) as nodes:
        client = nodes.client(0, node=0, peer_nodes=[], persist_url=str(tmp_path), num_persisted=0)
        arena = client.allocate(PAGE)
        history = [  # iteration, memory, file
            (10, None, None),
            (11, (10, 11), (10, 10)),
            (12, (12, 11), (12, 10)),
            (13, (12, 13), (12, 13)),
            (14, (14, 13), (12, 13)),
        ]
        for number, (iteration, memory, file) in enumerate(history):
            partial(client, arena, number % 3, iteration, memory)
            stored(client, arena, iteration, file)
            assert client.flush()
            assert fetch(client, 0, iteration, node=0) == expected(*(memory or (iteration, iteration)))
            with WindowFolder(tmp_path).open(WindowKey(start_iteration=iteration, generation=1), 0) as opened:
                assert [bytes(opened.read_slice(0))] == expected(*(file or (iteration, iteration)))
                (part,) = opened.verify().slices
                assert part.captured_at == file
                assert file is None or json.loads(part.header["tokens_at_risk"]) == [list(file)]
        assert client.problems() == []
        # Window 14 is on storage already, and its file is not replaced by another one.
        client.persist(14)
        assert client.flush() and client.problems() == []
        with WindowFolder(tmp_path).open(WindowKey(start_iteration=14, generation=1), 0) as opened:
            assert [bytes(opened.read_slice(0))] == expected(12, 13)


def test_a_file_contains_all_pieces_if_its_level_says_so(tmp_path: Path) -> None:
    with cluster(1) as nodes:
        client = nodes.client(0, node=0, peer_nodes=[], persist_url=str(tmp_path), num_persisted=0)
        arena = client.allocate(PAGE)
        earlier = []
        for number, is_whole in enumerate((False, False, True)):
            iteration, captured_at = 10 + number, (10, 10 + number)
            partial(client, arena, number, iteration, captured_at if number else None)
            wait_replicated(arena, iteration)
            level = StoredLevel(captured_at=captured_at, header={}, is_whole=is_whole) if number else None
            client.committed(iteration, is_written=True, level=level)
            assert client.flush()
            with WindowFolder(tmp_path).open(WindowKey(start_iteration=iteration, generation=1), 0) as opened:
                assert [bytes(opened.read_slice(0))] == expected(*captured_at)
                earlier.append([key.start_iteration for key in opened.earlier])
        assert earlier == [[], [10], []] and client.problems() == []


def test_a_file_whose_earlier_pieces_could_not_be_written_is_refused_until_one_has_everything(tmp_path: Path) -> None:
    with cluster(1) as nodes:
        client = nodes.client(0, node=0, peer_nodes=[], persist_url=str(tmp_path), num_persisted=0)
        arena = client.allocate(PAGE)
        partial(client, arena, 0, 10, None)
        stored(client, arena, 10, None)
        (tmp_path / "window_0000011.1").write_text("a file in the place of the folder")
        partial(client, arena, 1, 11, (10, 11))
        stored(client, arena, 11, (10, 11))
        assert client.flush() and arena.status(FAILED_START) == 11
        partial(client, arena, 2, 12, (12, 11))
        stored(client, arena, 12, (12, 11))  # memory still has the piece of iteration 11
        partial(client, arena, 0, 13, (12, 13))
        stored(client, arena, 13, (12, 11))
        assert client.flush() and arena.status(FAILED_START) == 11, "window 12 has repaired it"
        partial(client, arena, 1, 14, (14, 13))
        stored(client, arena, 14, (9, 13))
        assert client.flush() and arena.status(FAILED_START) == 14
        assert client.buffer_states().failed_start == 14
        problems = [problem["error"] for problem in client.problems()]
        assert len(problems) == 2 and "its state of iteration 9 is neither in memory nor in an earlier" in problems[1]
        partial(client, arena, 2, 15, (14, 15))
        stored(client, arena, 15, None)
        assert client.flush() and arena.status(FAILED_START) == 14
        with WindowFolder(tmp_path).open(WindowKey(start_iteration=15, generation=1), 0) as opened:
            assert [bytes(opened.read_slice(0))] == expected(14, 15)


@pytest.mark.parametrize(
    "content",
    [
        {"captured_at": [10], "header": {}},
        {"captured_at": [10, -1], "header": {}},
        {"captured_at": [10, 11], "header": {"x": 1}},
        {"captured_at": "x", "header": {}},
        {"captured_at": [10, 11], "header": {}, "is_whole": 1},
        7,
    ],
)
def test_levels_that_no_rank_sends_are_refused(tmp_path: Path, content: object) -> None:
    with cluster(1) as nodes:
        client = nodes.client(0, node=0, peer_nodes=[], persist_url=str(tmp_path), num_persisted=0)
        arena = client.allocate(PAGE)
        partial(client, arena, 0, 10, None)
        wait_replicated(arena, 10)
        client._request({"op": "committed", "start_iteration": 10, "stored": content})
        with pytest.raises(ControlError, match="stored"):
            client.flush()
        assert arena.status(COMMITTED_START) == -1 and not any(tmp_path.iterdir())

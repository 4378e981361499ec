"""Tests one rank's connection, served in this process."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.planning.snapshot.memory import BufferStates
from megatron_ft.snapshot.server import rank_session
from megatron_ft.snapshot.server.client import (
    MAX_UNREAD,
    NUM_PROBLEMS,
    PERSISTED_START,
    REPLICATED_START,
    KeeperClient,
    KeeperRefused,
)
from megatron_ft.snapshot.server.store import Memory, Segment
from megatron_ft.snapshot.server.wire import Refused
from megatron_ft.testing.snapshot_servers import (
    PAGE,
    begin,
    capture,
    content,
    fetch,
    wait_replicated,
    wait_until,
    window,
)
from tests.helpers.failing_store import FailingStore
from tests.unit.snapshot.server.served import Interrupted, Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    running = Served(tmp_path)
    yield running
    running.close()


def committed_and_next(served: Served) -> KeeperClient:
    """Return a rank whose window 10, requested for storage, was superseded by window 12."""
    client = served.client()
    arena = client.allocate(2 * PAGE)
    for number in range(2):
        window(client, arena, 0, number, 10 + 2 * number)
        wait_replicated(arena, 10 + 2 * number)
        client.committed(10 + 2 * number)
    return client


def test_a_buffer_that_is_being_written_is_named_and_not_given_away(served: Served) -> None:
    client = committed_and_next(served)
    wait_until(lambda: client.buffer_states().pinned == {0, 1}, "both are due")
    begin(client, 0, 14)
    with pytest.raises(KeeperRefused, match="buffer=0: must not be overwritten"):
        client.problems()
    served.persister.start()
    wait_until(lambda: not client.buffer_states().pinned, "both are written")
    begin(client, 0, 14)
    assert len(list(Path(served.url).rglob("*.window"))) == 2
    assert client.problems() == []
    client.close()


def test_a_commit_that_the_keeper_has_yet_to_take_in_is_known_to_be_missing(served: Served) -> None:
    """The commit may pin a buffer, so the pinned buffers on the status page are not complete yet."""
    client = served.client()
    assert client.buffer_states() == BufferStates()
    arena = client.allocate(2 * PAGE)
    window(client, arena, 0, 1, 10)
    wait_replicated(arena, 10)
    assert client.buffer_states().knows_commits
    with served.store.lock:
        client.committed(10)
        states = client.buffer_states()
        assert states.replicated == {0: -1, 1: 10, 2: -1} and not states.pinned and not states.knows_commits
    wait_until(lambda: client.buffer_states().knows_commits, "it is taken in")
    assert client.buffer_states().pinned == {1}
    client.allocate(4 * PAGE)
    assert client.buffer_states() == BufferStates(
        replicated={0: -1, 1: -1, 2: -1}, given_up={0: -1, 1: -1, 2: -1}, pinned=frozenset()
    ), "new memory holds nothing, and no commit is outstanding"
    client.close()


def test_a_window_the_job_lets_go_of_is_forgotten(served: Served) -> None:
    client = served.client()
    arena = client.allocate(2 * PAGE)
    for number in range(2):
        window(client, arena, 0, number, 10 + 2 * number)
    wait_replicated(arena, 12)
    client.abandon(10)
    assert [entry.start_iteration for entry in client.inventory(0)] == [12]
    client.committed(12)
    with pytest.raises(KeeperRefused, match="start_iteration=12: there is no uncommitted window"):
        client.abandon(12)
    client.close()


def test_each_node_begins_to_ask_with_the_next_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(address: str, greeting: dict[str, object]) -> None:
        asked.append(int(address[-1]))
        raise ConnectionRefusedError("the server has ended")

    monkeypatch.setattr(rank_session, "connect", connect)
    monkeypatch.setattr(rank_session, "_MAX_INQUIRIES", 1)
    client = served.client(peers={str(node): f"127.0.0.1:{node + 1}" for node in range(4)})
    served.store.node = 2
    assert client.inventory(0, ask_peers=True) == []
    assert asked == [4, 1, 2]
    assert [text.partition(" did")[0] for text in client.unreachable] == ["node 3", "node 0", "node 1"]
    client.close()


def test_a_request_for_lists_of_windows_ends_with_its_process(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed = threading.Event()

    def connect(address: str, greeting: dict[str, object]) -> None:
        has_failed.set()
        raise ConnectionResetError("the peer has closed the connection")

    monkeypatch.setattr(rank_session, "connect", connect)
    monkeypatch.setattr(rank_session, "_RETRY_SECONDS", 60.0)
    monkeypatch.setattr(rank_session, "_ASKING_SECONDS", 120.0)
    replaced = served.client(peers={"0": "127.0.0.1:1", "1": "127.0.0.1:2"})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(replaced.inventory, 0, ask_peers=True)
        assert has_failed.wait(60), "timed out"
        client = served.client()
        with pytest.raises(ControlError, match="the connection was lost"):
            asked.result(60)
    served.sessions[0].join(20)
    assert not served.sessions[0].is_alive()
    client.close()


def test_many_slices_between_two_requests(served: Served) -> None:
    """The answers must not fill the socket."""
    client = served.client()
    num_slices = 40 * MAX_UNREAD
    arena = client.allocate(num_slices * PAGE)
    begin(client, 0, 0, num_slices=num_slices)
    for index in range(num_slices):
        capture(client, arena, 0, 0, 0, index, num_bytes=16)
    wait_until(lambda: arena.status(REPLICATED_START) == 0, "all are hashed", seconds=60)
    client.close()


class GatedMemory(Memory):
    """Memory whose allocations begin and then wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.gate = threading.Event(), threading.Event()

    def allocate(self, name: str, num_bytes: int) -> Segment:
        self.has_begun.set()
        assert self.gate.wait(60), "timed out"
        return super().allocate(name, num_bytes)


@pytest.mark.parametrize("generation", [1, 2])
def test_an_allocation_of_a_replaced_process_does_not_count(tmp_path: Path, generation: int) -> None:
    """The successor may have mapped its own memory by then."""
    memory = GatedMemory()
    served = Served(tmp_path, memory)
    replaced = served.client()
    with ThreadPoolExecutor(2) as pool:
        earlier = pool.submit(replaced.allocate, 2 * PAGE)
        assert memory.has_begun.wait(60), "timed out"
        client = served.client(generation=generation)
        later = pool.submit(client.allocate, 4 * PAGE)
        memory.gate.set()
        with pytest.raises(ControlError, match="the connection was lost"):
            earlier.result(60)
        served.sessions[0].join(60)
        arena = later.result(60)
    own = served.store.ranks[0]
    assert own.segment is not None and memory.used_bytes == own.segment.num_bytes == PAGE + 3 * 4 * PAGE
    window(client, arena, 0, 0, 10)
    wait_replicated(arena, 10)
    assert fetch(client, 0, 10, node=0, generation=generation) == [content(0, 10, PAGE), content(0, 11, PAGE)]
    client.close()
    served.close()


def test_a_request_of_a_process_that_is_replaced_meanwhile_changes_nothing(served: Served) -> None:
    """The request would release the buffer that the successor is filling."""
    replaced = served.client()
    replaced.allocate(2 * PAGE)
    clients: list[KeeperClient] = []

    def greet() -> None:
        clients.append(served.client())
        window(clients[0], clients[0].allocate(2 * PAGE), 0, 1, 20)
        clients[0].problems()

    about = {"start_iteration": 10, "num_slices": 2, "plan": {}, "buffer": 1}
    with pytest.raises(Refused, match="a newer connection of this rank has replaced"):
        served.sessions[0]._answer(Interrupted(greet, "buffer", op="begin", **about), [])
    assert [entry.start_iteration for entry in clients[0].inventory(0)] == [20]
    clients[0].close()


@pytest.mark.parametrize("refused", ["open wb", "ls"])
def test_a_client_of_an_object_store_that_fails_is_reported(
    served: Served, store: type[FailingStore], refused: str
) -> None:
    """The client's errors have no common class. An error that the thread does not expect would end the snapshot
    server."""
    url = f"failing://{uuid4().hex}/windows"
    client = served.client(persist_url=url, num_persisted=1)
    arena = client.allocate(2 * PAGE)
    served.persister.start()
    store.refused = {refused}
    window(client, arena, 0, 0, 10)
    wait_replicated(arena, 10)
    client.committed(10)
    wait_until(lambda: arena.status(NUM_PROBLEMS) == 1, "a problem")
    (problem,) = client.problems()
    assert (problem["what"], problem["start_iteration"]) == ("persist" if refused != "ls" else "retain", 10)
    assert f"ClientError: {refused}: the token has expired" in problem["error"]
    store.refused = set()
    window(client, arena, 0, 1, 12)
    wait_replicated(arena, 12)
    client.committed(12)
    wait_until(lambda: arena.status(PERSISTED_START) == 12, "the next window is written")
    client.close()

"""One rank's connection, served in this process."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.runtime.keeper import ranks
from megatron_ft.runtime.keeper.client import MAX_UNREAD, REPLICATED_START, KeeperClient, KeeperRefused
from megatron_ft.runtime.keeper.hashing import Hasher
from megatron_ft.runtime.keeper.memory import Memory
from megatron_ft.runtime.keeper.persisting import Persister
from megatron_ft.runtime.keeper.ranks import RankSession
from megatron_ft.runtime.keeper.store import Store
from tests.unit.runtime.keeper.nodes import PAGE, TOKEN, Cluster, begin, capture, wait_replicated, wait_until, window


class Served:
    """A store whose storage thread has not started yet."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(0, TOKEN, Memory())
        self.persister = Persister(self.store)
        self.path = str(folder / "s")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.url = str(folder / "windows")
        Hasher(self.store).start()

    def client(self) -> KeeperClient:
        """Rank 0, which persists every window."""
        accept = threading.Thread(target=self._accept)
        accept.start()
        hello = Cluster(Path()).hello(0, node=0, peer_nodes=[], persist_every=1, persist_url=self.url, world_size=1)
        client = KeeperClient(self.path, hello=hello)
        accept.join()
        return client

    def _accept(self) -> None:
        RankSession(self.listener.accept()[0], self.store, self.persister).start()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    running = Served(tmp_path)
    yield running
    running.listener.close()


def committed_and_next(served: Served) -> KeeperClient:
    """Window 10, due to storage, has been superseded by window 12."""
    client = served.client()
    arena = client.allocate(2 * PAGE)
    for number in range(2):
        window(client, arena, 0, number, 10 + 2 * number)
        wait_replicated(arena, 10 + 2 * number)
        client.committed(10 + 2 * number)
    return client


def test_a_buffer_waits_until_it_is_written(served: Served) -> None:
    client = committed_and_next(served)
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (begin(client, 0, 14), done.set()))
    waiting.start()
    assert not done.wait(0.3), "the buffer is given away before it was written"
    served.persister.start()
    assert done.wait(20)
    waiting.join()
    wait_until(lambda: len(list(Path(served.url).rglob("*.window"))) == 2, "both are written")
    assert client.problems() == []
    client.close()


def test_a_storage_that_stands_still_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PINNED_SECONDS", 0.1)
    client = committed_and_next(served)
    with pytest.raises(KeeperRefused, match="still being written to storage after 0.1 s"):
        begin(client, 0, 14)
    client.close()


def test_many_slices_between_two_requests(served: Served) -> None:
    """Their answers must not fill the socket."""
    client = served.client()
    num_slices = 40 * MAX_UNREAD
    arena = client.allocate(num_slices * PAGE)
    begin(client, 0, 0, num_slices=num_slices)
    for index in range(num_slices):
        capture(client, arena, 0, 0, 0, index, num_bytes=16)
    wait_until(lambda: arena.status(REPLICATED_START) == 0, "all are hashed", seconds=60)
    client.close()

"""Serves the store of a snapshot server in this process. Its storage is blocked until the test releases it."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.snapshot.server.rank_session import RankSession
from megatron_ft.snapshot.server.store import Memory, Store
from megatron_ft.snapshot.server.workers import Hasher, Persister
from megatron_ft.testing.snapshot_servers import TOKEN, Cluster


class Interrupted(dict[str, Any]):
    """Request during which something happens: after it was admitted, when its field ``at`` is read."""

    def __init__(self, happens: Callable[[], None], at: str, **fields: object) -> None:
        super().__init__(fields)
        self._happens, self._at = happens, at

    def get(self, name: str, default: object = None) -> Any:
        """Read a field."""
        if name == self._at:
            self._happens()
        return super().get(name, default)


class Served:
    """Store whose storage thread has not started. ``persister.start()`` starts it."""

    def __init__(self, folder: Path, memory: Memory | None = None) -> None:
        self.store = Store(0, TOKEN, Memory() if memory is None else memory)
        self.persister = Persister(self.store)
        self.path = str(folder / "s")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.url = str(folder / "windows")
        self.sessions: list[RankSession] = []
        Hasher(self.store).start()

    def client(self, rank: int = 0, **changes: object) -> KeeperClient:
        """Connect as the only rank, which persists every window. ``changes`` are fields of the first message."""
        accept = threading.Thread(target=self._accept)
        accept.start()
        about: dict[str, object] = {"persist_every": 1, "persist_url": self.url, "world_size": 1, **changes}
        hello = Cluster(Path()).hello(rank, node=0, peer_nodes=[], **about)
        client = KeeperClient(self.path, hello=hello)
        accept.join()
        return client

    def _accept(self) -> None:
        self.sessions.append(RankSession(self.listener.accept()[0], self.store, self.persister))
        self.sessions[-1].start()

    def close(self) -> None:
        """Accept no more connections."""
        self.listener.close()

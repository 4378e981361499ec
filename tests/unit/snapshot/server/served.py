"""A keeper's store served in this process, whose storage stands still until it is told to go on."""

import socket
import threading
from pathlib import Path

from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.snapshot.server.memory import Memory
from megatron_ft.snapshot.server.rank_session import RankSession
from megatron_ft.snapshot.server.store import Store
from megatron_ft.snapshot.server.workers import Hasher, Persister
from megatron_ft.testing.snapshot_servers import TOKEN, Cluster


class Served:
    """A store whose storage thread has not started yet: ``persister.start()`` has storage answer."""

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

    def close(self) -> None:
        """Take no more connections."""
        self.listener.close()

"""Hashes what ranks have captured: a thread; each piece in one call, which lets other threads run."""

import threading
from collections.abc import Callable

import xxhash

from megatron_ft.snapshot.server.own_windows import HeldWindow
from megatron_ft.snapshot.server.store import OwnRank, Store
from megatron_ft.snapshot.window import Slice

_ARRIVING_BYTES = 1 << 20
"""Received at a time: what is hashed next is still in the processor's cache."""


class Hasher(threading.Thread):
    """Gives slices their hashes, oldest first."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="hasher", daemon=True)
        self._store = store

    def run(self) -> None:
        """Hash until the process ends."""
        while True:
            self._hash_one()

    def _hash_one(self) -> None:
        """A function of its own, so that no memory is referred to while the thread waits."""
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._next() is not None)
            found = self._next()
            assert found is not None, "woken without work"
            own, window, part = found
            payload = own.view(window, part)
        hashes = part.hash_pieces(payload)
        with self._store.lock:
            part.hashes = hashes
            own.hashed_bytes += part.num_bytes
            own.publish()
            self._store.changed()

    def _next(self) -> tuple[OwnRank, HeldWindow, Slice] | None:
        for own in self._store.ranks.values():
            found = None if own.windows is None else own.windows.next_unhashed()
            if found is not None:
                return own, *found
        return None


def receive_hashed(part: Slice, payload: memoryview, receive_into: Callable[[memoryview], None]) -> tuple[str, ...]:
    """Receive a slice into ``payload`` and hash each piece while its bytes are still in the cache."""
    received, hashes = 0, []
    for piece in part.pieces:
        digest, position = xxhash.xxh3_128(), piece.offset
        while position < piece.end:
            if received <= position:
                target = min(part.num_bytes, received + _ARRIVING_BYTES)
                receive_into(payload[received:target])
                received = target
                continue
            stop = min(piece.end, received)
            digest.update(payload[position:stop])
            position = stop
        hashes.append(digest.hexdigest())
    receive_into(payload[received:])
    return tuple(hashes)

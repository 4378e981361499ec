"""The threads that hash captured slices and write windows to storage."""

import threading
from collections import deque
from dataclasses import dataclass

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.server.store import OwnRank, Store
from megatron_ft.snapshot.server.windows import HeldWindow, OwnWindows
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Slice


class Hasher(threading.Thread):
    """Thread that hashes captured slices, the oldest first. Other threads run while a piece is hashed."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="hasher", daemon=True)
        self._store = store

    def run(self) -> None:
        """Hash slices until the process ends."""
        while True:
            self._hash_one()

    def _hash_one(self) -> None:
        # This is a separate function, so that no local variable keeps memory alive while the thread waits.
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._next() is not None)
            found = self._next()
            assert found is not None, "there is no piece to hash"
            own, window, part = found
            # The view keeps the memory if the rank gets another arena while the bytes are hashed.
            payload = own.view(window, part)
        hashes = part.hash_pieces(payload)
        with self._store.lock:
            # If the buffer was given to another window meanwhile, this slice belongs to none, and no hash is used.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Write:
    own: OwnRank
    windows: OwnWindows
    window: HeldWindow
    payload: list[memoryview]
    url: str


class Persister(threading.Thread):
    """Thread that writes requested windows to storage, in the order of the requests.

    It writes from the memory into which the window was captured. This memory must not be overwritten from the request
    until the window is written.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(name="persister", daemon=True)
        self._store = store
        self._due: deque[_Write] = deque()

    def request(self, own: OwnRank, window: HeldWindow) -> None:
        """Request that a window is written, unless this was already requested. The store's lock must be held."""
        assert own.windows is not None and own.settings.persist_url is not None, (
            "no window, or no storage is configured"
        )
        if any(due.window is window for due in self._due):
            return
        # The views keep the memory. The pin keeps its content, because no window may begin in a pinned buffer.
        payload = [own.view(window, part) for part in window.slices]
        own.windows.pinned.add(window.buffer)
        url = own.settings.persist_url
        self._due.append(_Write(own=own, windows=own.windows, window=window, payload=payload, url=url))
        own.publish()

    def is_due(self, own: OwnRank) -> bool:
        """Return whether a requested window of this rank is not written yet. The store's lock must be held."""
        return any(due.own is own for due in self._due)

    def run(self) -> None:
        """Write requested windows until the process ends."""
        while True:
            self._write_one()

    def _write_one(self) -> None:
        # This is a separate function, so that no local variable keeps memory alive while the thread waits.
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._due)
            # The request stays in the queue until the window is written, so that a flush waits for it.
            due = self._due[0]
        error = self._write(due)
        with self._store.lock:
            self._due.popleft()
            # Unpin also after a failure, because full storage must not stop captures. The rank may have another arena
            # by now, so the request has its own reference to the windows.
            due.windows.pinned.discard(due.window.buffer)
            if error is None:
                due.own.persisted_start = due.window.start_iteration
                due.own.persisted_bytes += sum(part.nbytes for part in due.payload)
            else:
                due.own.note_problem("persist", error, due.window.start_iteration)
            due.own.publish()
            self._store.changed()
        # Older windows are deleted only after this one is durable.
        if error is None:
            self._delete_old(due)

    def _write(self, due: _Write) -> Exception | None:
        try:
            write_window(due.url, due.window, due.payload)
        except (CheckpointError, OSError) as error:
            self._store.report(f"cannot write window {due.window.start_iteration} of rank {due.window.rank}: {error}")
            return error
        return None

    def _delete_old(self, due: _Write) -> None:
        # Delete old windows. Rank 0 does this for all ranks; nothing is deleted if all windows are kept.
        window, num_persisted = due.window, due.own.settings.num_persisted
        # One process alone deletes: two would rename the same directories.
        if window.rank != 0 or num_persisted == 0:
            return
        try:
            # Only this rank's share of the payload is read; the other files are opened and compared.
            WindowFolder(due.url).retain(num_persisted, window.world_size, part=0, num_parts=window.world_size)
        except (CheckpointError, OSError) as error:
            with self._store.lock:
                due.own.note_problem("retain", error, window.start_iteration)
                due.own.publish()

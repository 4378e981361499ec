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
    """Computes the hashes of slices, oldest first; each piece in one call, which lets other threads run."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="hasher", daemon=True)
        self._store = store

    def run(self) -> None:
        """Hash until the process ends."""
        while True:
            self._hash_one()

    def _hash_one(self) -> None:
        # A function of its own: no local variable may keep memory alive while the thread waits.
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._next() is not None)
            found = self._next()
            assert found is not None, "there is no piece to hash"
            own, window, part = found
            # The view keeps the memory, should the rank get another arena while its bytes are hashed.
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
    """Writes requested windows in order, from the memory of their capture, which is pinned from the request on."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="persister", daemon=True)
        self._store = store
        self._due: deque[_Write] = deque()

    def request(self, own: OwnRank, window: HeldWindow) -> None:
        """Request a window unless it is already requested. The store's lock must be held."""
        assert own.windows is not None and own.settings.persist_url is not None, (
            "no window, or no storage is configured"
        )
        if any(due.window is window for due in self._due):
            return
        # The views keep the memory, the pin keeps its content: the rank must not begin a window there meanwhile.
        payload = [own.view(window, part) for part in window.slices]
        own.windows.pinned.add(window.buffer)
        url = own.settings.persist_url
        self._due.append(_Write(own=own, windows=own.windows, window=window, payload=payload, url=url))
        own.publish()

    def is_due(self, own: OwnRank) -> bool:
        """Whether a window of this rank is still to be written. The store's lock must be held."""
        return any(due.own is own for due in self._due)

    def run(self) -> None:
        """Write until the process ends."""
        while True:
            self._write_one()

    def _write_one(self) -> None:
        # A function of its own: no local variable may keep memory alive while the thread waits.
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._due)
            # It leaves the queue when it is written: until then a flush waits for it, and it is not requested twice.
            due = self._due[0]
        error = self._write(due)
        with self._store.lock:
            self._due.popleft()
            # Also after a failure: storage that is full or slow must not stop captures. The windows are those of the
            # request, for the rank may have another arena by now.
            due.windows.pinned.discard(due.window.buffer)
            if error is None:
                due.own.persisted_start = due.window.start_iteration
                due.own.persisted_bytes += sum(part.nbytes for part in due.payload)
            else:
                due.own.note_problem("persist", error, due.window.start_iteration)
            due.own.publish()
            self._store.changed()
        # Older windows go only after this one is durable.
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
        # Delete what is too old: rank 0 for all ranks; nothing where all windows are kept.
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

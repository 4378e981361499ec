"""Writes windows to storage: a thread, one window at a time, from the memory they were captured into."""

import threading
from collections import deque
from dataclasses import dataclass

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.server.own_windows import HeldWindow, OwnWindows
from megatron_ft.snapshot.server.store import OwnRank, Store
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.snapshot.storage.window_folder import WindowFolder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Due:
    own: OwnRank
    windows: OwnWindows
    window: HeldWindow
    payload: list[memoryview]
    url: str


class Persister(threading.Thread):
    """Every window that was asked for is written, in order; its buffer is pinned from the request on."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="persister", daemon=True)
        self._store = store
        self._due: deque[_Due] = deque()

    def request(self, own: OwnRank, window: HeldWindow) -> None:
        """Write a window soon, unless it is about to be. The store's lock must be held."""
        assert own.windows is not None and own.settings.persist_url is not None, "no window, or no place to write it to"
        if any(due.window is window for due in self._due):
            return
        payload = [own.view(window, part) for part in window.slices]
        own.windows.pinned.add(window.buffer)
        url = own.settings.persist_url
        self._due.append(_Due(own=own, windows=own.windows, window=window, payload=payload, url=url))
        own.publish()

    def is_due(self, own: OwnRank) -> bool:
        """Whether a window of this rank has yet to be written. The store's lock must be held."""
        return any(due.own is own for due in self._due)

    def run(self) -> None:
        """Write until the process ends."""
        while True:
            self._write_one()

    def _write_one(self) -> None:
        """A function of its own, so that no memory is referred to while the thread waits."""
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._due)
            due = self._due[0]
        error = self._write(due)
        with self._store.lock:
            self._due.popleft()
            due.windows.pinned.discard(due.window.buffer)
            if error is None:
                due.own.persisted_start = due.window.start_iteration
                due.own.persisted_bytes += sum(part.nbytes for part in due.payload)
            else:
                due.own.note_problem("persist", error, due.window.start_iteration)
            due.own.publish()
            self._store.changed()
        if error is None:
            self._retain(due)

    def _write(self, due: _Due) -> Exception | None:
        try:
            write_window(due.url, due.window, due.payload)
        except (CheckpointError, OSError) as error:
            self._store.report(f"window {due.window.start_iteration} of rank {due.window.rank}: {error}")
            return error
        return None

    def _retain(self, due: _Due) -> None:
        """Delete what is too old: rank 0 for all, and nothing where all are to be kept."""
        window, num_persisted = due.window, due.own.settings.num_persisted
        if window.rank != 0 or num_persisted == 0:
            return
        try:
            # Its own part of the reading: other ranks' files are opened, not read through.
            WindowFolder(due.url).retain(num_persisted, window.world_size, part=0, num_parts=window.world_size)
        except (CheckpointError, OSError) as error:
            with self._store.lock:
                due.own.note_problem("retain", error, window.start_iteration)
                due.own.publish()

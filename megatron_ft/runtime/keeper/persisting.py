"""Writes windows to storage: a thread, one window at a time, from the memory they were captured into."""

import threading
from typing import Any

from megatron_ft.errors import CheckpointError
from megatron_ft.runtime.keeper.store import OwnRank, Store
from megatron_ft.runtime.keeper.windows import Window
from megatron_ft.runtime.storage.windows import WindowManifest, write_window


class Persister(threading.Thread):
    """Of each rank the newest window that was asked for is written next."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="persister", daemon=True)
        self._store = store
        self._due: dict[int, tuple[OwnRank, Window]] = {}

    def request(self, own: OwnRank, window: Window) -> None:
        """Write a window soon. The store's lock must be held."""
        earlier = self._due.get(window.origin.rank)
        if earlier is not None and earlier[1] is not window:
            own.note_problem("persist", "overtaken by a newer window before it was begun", earlier[1].start_iteration)
        self._due[window.origin.rank] = own, window

    def run(self) -> None:
        """Write until the process ends."""
        while True:
            self._write_one()

    def _write_one(self) -> None:
        """A function of its own, so that no memory is referred to while the thread waits."""
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._due)
            own, window = self._due.pop(next(iter(self._due)))
            windows, url = own.windows, own.settings.persist_url
            if windows is None or window not in windows:
                own.note_problem("persist", "forgotten before it was written", window.start_iteration)
                own.publish()
                return
            payload = [own.view(window, part) for part in window.slices]
            windows.pinned.add(window.buffer)
        assert url is not None, "a request to persist without a place"
        error = self._write(url, window.manifest(), payload)
        with self._store.lock:
            windows.pinned.discard(window.buffer)
            if error is None:
                own.persisted_start = window.start_iteration
            else:
                own.note_problem("persist", error, window.start_iteration)
            own.publish()
            self._store.changed()

    def _write(self, url: str, manifest: dict[str, Any], payload: list[memoryview]) -> Exception | None:
        try:
            write_window(url, WindowManifest.from_json(manifest), payload)
        except (CheckpointError, OSError) as error:
            self._store.report(f"window {manifest['start_iteration']} of rank {manifest['rank']}: {error}")
            return error
        return None

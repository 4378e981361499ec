"""The folder of a run's windows: the newest that is complete, damage, deletion.

::

    windows/window_0000012/rank-00003.window   complete once all ranks' files verify and belong together
    windows/window_0000012.1/                  captured again by generation 1
    windows/superseded_window_0000020          set aside by a run that resumed from before it
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.storage.backends import open_backend
from megatron_ft.snapshot.storage.checkpoints import DamageReport
from megatron_ft.snapshot.storage.window_file import WindowFile, rank_name, window_name
from megatron_ft.snapshot.window import Window

_DIRECTORY = re.compile(r"window_(\d{7,19})(?:\.(\d{1,9}))?")
_FOLDER = "windows"
_SUPERSEDED_PREFIX = "superseded_"
_SHARED = ("run_id", "generation", "topology", "world_size", "start_iteration", "num_slices", "plan")
"""Fields that are equal in all files of a window."""


def persist_url(config: JobConfig, run_dir: Path) -> str:
    """Return the path or URL for this run's persisted windows."""
    url = config.snapshot.persist_url
    return str(run_dir / _FOLDER) if url is None else f"{url.rstrip('/')}/{run_dir.name}"


def open_windows(config: JobConfig, run_dir: Path) -> "WindowFolder | None":
    """Open the folder of this run's persisted windows; None where it has none."""
    if config.snapshot.persist_url is None and not (run_dir / _FOLDER).is_dir():
        return None
    return WindowFolder(persist_url(config, run_dir))


class WindowFolder:
    """The windows below one folder, a path or a URL."""

    def __init__(self, folder: Path | str) -> None:
        self._backend = open_backend(folder)

    def describe(self, stored: WindowKey) -> str:
        """Full path or URL of a window."""
        return self._backend.describe(window_name(stored))

    def list_windows(self) -> list[WindowKey]:
        """All windows, complete or not, oldest first."""
        found = []
        for match in filter(None, map(_DIRECTORY.fullmatch, self._backend.list_directories())):
            key = WindowKey(start_iteration=int(match[1]), generation=int(match[2] or 0))
            if window_name(key) == match[0]:  # no other spelling of the same numbers
                found.append(key)
        return sorted(found)

    def open(self, stored: WindowKey, rank: int) -> WindowFile:
        """Open a rank's file, whose window, generation and rank must be those of its path.

        Raises:
            CheckpointError: as ``open_window``.
        """
        expect = {"start_iteration": stored.start_iteration, "generation": stored.generation, "rank": rank}
        directory, name = window_name(stored), rank_name(rank)
        return WindowFile(self._backend.describe(directory, name), lambda: self._backend.open(directory, name), expect)

    def verify(self, stored: WindowKey, world_size: int, *, part: int = 0, num_parts: int = 1) -> Window:
        """Check that a window is complete and return the part of rank ``part``.

        Every caller opens the files of all ranks and compares their descriptions. It reads the payload of every
        ``num_parts``-th file, starting at ``part``, so that callers can share the reading.

        Raises:
            CheckpointError: naming the first file that is missing, damaged, or of another window.
        """
        windows: list[Window] = []
        for rank in range(world_size):
            with self.open(stored, rank) as opened:
                _check_same(opened.window, windows[0] if windows else opened.window, world_size, opened.path)
                # Only payloads are divided among callers: whether files belong together takes the heads of all of them.
                windows.append(opened.verify() if rank % num_parts == part else opened.window)
        return windows[part]

    def newest(
        self, world_size: int, refuse: Callable[[Window], str | None] = lambda _: None
    ) -> tuple[WindowKey | None, list[DamageReport]]:
        """Return the newest window that verifies for which ``refuse`` returns None, and a report on each newer one."""
        return self._first_sound(self.list_windows()[::-1], world_size, refuse=refuse)

    def retain(self, num_windows: int, world_size: int, *, part: int = 0, num_parts: int = 1) -> list[WindowKey]:
        """Keep the newest ``num_windows`` that verify and all windows newer than the oldest of them; delete the rest.

        Nothing is deleted while fewer than ``num_windows`` verify. Call it in one process of the job; ``part`` and
        ``num_parts`` limit the payload that it reads, as in :meth:`verify`.

        Returns:
            the deleted windows.

        Raises:
            CheckpointError: naming the window that could not be deleted.
        """
        assert num_windows >= 1, f"num_windows={num_windows}: must be at least 1"
        found, candidates = 0, self.list_windows()
        # From the newest on. Windows that do not verify stay if they are newer: other ranks may still be writing them.
        while candidates and found < num_windows:
            stored, _ = self._first_sound([candidates.pop()], world_size, part, num_parts)
            found += stored is not None
        # With fewer sound windows than that, the older ones are all there is: they stay.
        removed = candidates if found == num_windows else []
        for stored in removed:
            self._delete(stored)
        return removed

    def set_aside_from(self, iteration: int) -> list[str]:
        """Rename windows that start at ``iteration`` or later; return the new names.

        Call it before training resumes at ``iteration`` with another history than that of these windows, because it may
        write them again.
        """
        return self.set_aside([stored for stored in self.list_windows() if stored.start_iteration >= iteration])

    def set_aside(self, windows: Sequence[WindowKey]) -> list[str]:
        """Rename ``windows``, so that they do not count as windows of the run; return the new names."""
        taken, moved = set(self._backend.list_directories()), []
        for stored in windows:
            name, attempt = _SUPERSEDED_PREFIX + window_name(stored), 0
            target = name
            while target in taken:
                attempt += 1
                target = f"{name}_{attempt}"
            self._move(stored, target)
            taken.add(target)
            moved.append(target)
        return moved

    def _first_sound(
        self,
        candidates: Sequence[WindowKey],
        world_size: int,
        part: int = 0,
        num_parts: int = 1,
        refuse: Callable[[Window], str | None] = lambda _: None,
    ) -> tuple[WindowKey | None, list[DamageReport]]:
        reports = []
        for stored in candidates:
            try:
                reason = refuse(self.verify(stored, world_size, part=part, num_parts=num_parts))
            except CheckpointError as error:
                reason = str(error)
            if reason is None:
                return stored, reports
            reports.append(DamageReport(path=self.describe(stored), reason=reason))
        return None, reports

    def _delete(self, stored: WindowKey) -> None:
        try:
            self._backend.delete(window_name(stored))
        except OSError as error:
            raise CheckpointError(f"{self.describe(stored)}: cannot be deleted: {error}") from error

    def _move(self, stored: WindowKey, target: str) -> None:
        try:
            self._backend.move(window_name(stored), target)
        except OSError as error:
            raise CheckpointError(f"{self.describe(stored)}: cannot be renamed: {error}") from error


def _check_same(window: Window, first: Window, world_size: int, where: str) -> None:
    if window.world_size != world_size:
        raise CheckpointError(f"{where}: world_size={window.world_size}: must be {world_size}")
    # Files of different captures can lie in one folder, each of them sound: a mixture of them is no state of the job.
    for name in _SHARED:
        if getattr(window, name) != getattr(first, name):
            raise CheckpointError(f"{where}: {name} differs from rank 0: the files belong to different windows")

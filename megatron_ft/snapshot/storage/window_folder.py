"""The folder of a run's windows: which are complete, which is the newest, which may go.

::

    windows/window_0000012/rank-00003.window   complete once all ranks' files verify and belong together
    windows/window_0000012.1/                  captured again by generation 1
    windows/superseded_window_0000020          set aside by a run that went back before it
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage.backends import open_backend
from megatron_ft.snapshot.storage.window_file import OpenedWindow, rank_name
from megatron_ft.snapshot.window import WindowManifest

_DIRECTORY = re.compile(r"window_(\d{7,19})(?:\.(\d{1,9}))?")
_SUPERSEDED_PREFIX = "superseded_"
_SHARED = ("run_id", "generation", "topology", "world_size", "start_iteration", "num_slices", "plan")
"""Fields in which the files of one window agree."""


@dataclass(frozen=True, slots=True, order=True)
class FolderEntry:
    """One directory of the folder; ordered by age, oldest first."""

    start_iteration: int
    generation: int
    name: str
    """Of the directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedWindow:
    """A window that was passed over, and why."""

    path: str
    """Path or URL."""
    reason: str


class WindowFolder:
    """The windows below one folder, a path or a URL."""

    def __init__(self, folder: Path | str) -> None:
        self._backend = open_backend(folder)

    def describe(self, stored: FolderEntry) -> str:
        """Full path or URL of a window."""
        return self._backend.describe(stored.name)

    def list_windows(self) -> list[FolderEntry]:
        """All windows, complete or not, oldest first."""
        matches = map(_DIRECTORY.fullmatch, self._backend.list_directories())
        return sorted(FolderEntry(int(match[1]), int(match[2] or 0), match[0]) for match in matches if match)

    def open(self, stored: FolderEntry, rank: int) -> OpenedWindow:
        """Open a rank's file; its manifest must name the window, the generation and the rank that its path names.

        Raises:
            CheckpointError: as ``windows.open_window``.
        """
        expect = {"start_iteration": stored.start_iteration, "generation": stored.generation, "rank": rank}
        where = self._backend.describe(stored.name, rank_name(rank))
        return OpenedWindow(where, lambda: self._backend.open(stored.name, rank_name(rank)), expect)

    def verify(self, stored: FolderEntry, world_size: int, *, part: int = 0, num_parts: int = 1) -> WindowManifest:
        """Check that a window is complete and return the manifest of rank ``part``.

        Every caller opens the files of all ranks and compares their manifests; the payload is read of every
        ``num_parts``-th file, starting at ``part``, so that callers can share the reading.

        Raises:
            CheckpointError: naming the first file that is missing, damaged, or of another window.
        """
        manifests: list[WindowManifest] = []
        for rank in range(world_size):
            with self.open(stored, rank) as opened:
                _check_same(opened.manifest, manifests[0] if manifests else opened.manifest, world_size, opened.path)
                manifests.append(opened.verify() if rank % num_parts == part else opened.manifest)
        return manifests[part]

    def complete(self, start_iteration: int, world_size: int) -> FolderEntry | None:
        """The window that starts at ``start_iteration`` and verifies, of the newest generation; None without one."""
        same = [stored for stored in self.list_windows() if stored.start_iteration == start_iteration]
        return self._first_sound(same[::-1], world_size)[0]

    def newest(self, world_size: int) -> tuple[FolderEntry | None, list[DamagedWindow]]:
        """The newest window that verifies, and a report on each newer one that did not."""
        return self._first_sound(self.list_windows()[::-1], world_size)

    def retain(self, num_windows: int, world_size: int, *, part: int = 0, num_parts: int = 1) -> list[FolderEntry]:
        """Keep the newest ``num_windows`` that verify and whatever is newer than the oldest of them; delete the rest.

        Nothing goes while fewer than ``num_windows`` verify. Call it from one process of the job; ``part`` and
        ``num_parts`` bound how much of their payload it reads, as in :meth:`verify`.

        Returns:
            what was deleted.

        Raises:
            CheckpointError: naming the window that could not be deleted.
        """
        assert num_windows >= 1, f"num_windows={num_windows}: must be at least 1"
        found, candidates = 0, self.list_windows()
        while candidates and found < num_windows:
            stored, _ = self._first_sound([candidates.pop()], world_size, part, num_parts)
            found += stored is not None
        removed = candidates if found == num_windows else []
        for stored in removed:
            self._delete(stored)
        return removed

    def set_aside_from(self, iteration: int) -> list[str]:
        """Rename windows that start at ``iteration`` or later, so that a run that went back can write them anew.

        Call it before training goes on from ``iteration`` with another history than theirs.

        Returns:
            the new names.
        """
        return self.set_aside([stored for stored in self.list_windows() if stored.start_iteration >= iteration])

    def set_aside(self, windows: Sequence[FolderEntry]) -> list[str]:
        """Rename ``windows``, so that they do not count as windows of the run; the new names."""
        taken, moved = set(self._backend.list_directories()), []
        for stored in windows:
            target, attempt = _SUPERSEDED_PREFIX + stored.name, 0
            while target in taken:
                attempt += 1
                target = f"{_SUPERSEDED_PREFIX}{stored.name}_{attempt}"
            self._move(stored, target)
            taken.add(target)
            moved.append(target)
        return moved

    def _first_sound(
        self, candidates: Sequence[FolderEntry], world_size: int, part: int = 0, num_parts: int = 1
    ) -> tuple[FolderEntry | None, list[DamagedWindow]]:
        reports = []
        for stored in candidates:
            try:
                self.verify(stored, world_size, part=part, num_parts=num_parts)
            except CheckpointError as error:
                reports.append(DamagedWindow(path=self.describe(stored), reason=str(error)))
                continue
            return stored, reports
        return None, reports

    def _delete(self, stored: FolderEntry) -> None:
        try:
            self._backend.delete(stored.name)
        except OSError as error:
            raise CheckpointError(f"{self.describe(stored)}: cannot be deleted: {error}") from error

    def _move(self, stored: FolderEntry, target: str) -> None:
        try:
            self._backend.move(stored.name, target)
        except OSError as error:
            raise CheckpointError(f"{self.describe(stored)}: cannot be set aside: {error}") from error


def _check_same(manifest: WindowManifest, first: WindowManifest, world_size: int, where: str) -> None:
    if manifest.world_size != world_size:
        raise CheckpointError(f"{where}: world_size={manifest.world_size}: must be {world_size}")
    for name in _SHARED:
        if getattr(manifest, name) != getattr(first, name):
            raise CheckpointError(f"{where}: {name} differs from rank 0's: the files are not of one window")

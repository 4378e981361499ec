"""Manages the folder of a run's windows on storage: finds the newest complete window, verifies and deletes windows.

::

    windows/window_0000012/rank-00003.window   a window is complete if all ranks' files are valid and belong together
    windows/window_0000012.1/                  the same iterations, captured again in generation 1
    windows/superseded_window_0000020          renamed, because the run resumed from an earlier iteration
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import xxhash

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.serde import JsonValue, decode, parse_json
from megatron_ft.snapshot.storage.backends import open_backend
from megatron_ft.snapshot.storage.checkpoints import DamageReport
from megatron_ft.snapshot.storage.files import write_atomically
from megatron_ft.snapshot.storage.window_file import WindowFile, rank_name, window_name
from megatron_ft.snapshot.window import Window

# Rejected windows are not tried again, because their replay gave other results than the logged iterations. Their files
# are intact, so verification does not find them. The list is ``refused_windows.json`` in the run's folder. It
# identifies windows by their content and not by their names, because a run that resumes from an earlier iteration
# captures other windows with the same names.

REJECTED_NAME = "refused_windows.json"
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedWindow:
    """A window that is not used again, because its replay gave other results than training had logged."""

    start_iteration: int
    generation: int
    """Number of the membership (generation) whose ranks captured the window."""
    digest: str
    """Digest of the window's content: the result of ``window_digest``."""
    reason: str

    @classmethod
    def from_json(cls, content: JsonValue) -> "RejectedWindow":
        """Create an object from the result of ``dataclasses.asdict``. Raises ValueError for any other content."""
        names = [entry.name for entry in fields(cls)]
        if not isinstance(content, dict) or sorted(content) != sorted(names):
            raise ValueError(f"{str(content)[:80]}: must be an object with the fields {', '.join(names)}")
        window = cls(**{entry.name: decode(entry.type, content[entry.name], entry.name) for entry in fields(cls)})
        if not _DIGEST.fullmatch(window.digest):
            raise ValueError(f"digest={window.digest[:80]!r}: must be 32 hexadecimal digits")
        return window

    def add_to(self, run_dir: Path) -> None:
        """Add this window to the run's file of rejected windows, atomically. Only one process at a time may call this.

        Raises:
            CheckpointError: the file cannot be read or written; its content is unchanged.
        """
        rejected = [asdict(entry) for entry in [*RejectedWindow.read_all(run_dir), self]]
        try:
            write_atomically(run_dir, REJECTED_NAME, json.dumps(rejected, indent=1).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(f"{run_dir / REJECTED_NAME}: cannot be written: {error}") from error

    @classmethod
    def read_all(cls, run_dir: Path) -> "list[RejectedWindow]":
        """Read the list of rejected windows of a run, the oldest first; empty if the file does not exist.

        Raises:
            CheckpointError: the file cannot be read, or is not a list that ``RejectedWindow.add_to`` has written.
        """
        path = run_dir / REJECTED_NAME
        try:
            content = parse_json(path.read_bytes())
            if not isinstance(content, list):
                raise ValueError("must be a list")
            return [RejectedWindow.from_json(entry) for entry in content]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}; delete the file to try rejected windows again") from error

    @classmethod
    def reason_for(cls, run_dir: Path, windows: Sequence[Window]) -> str | None:
        """Return the reason why a window was rejected earlier in the run; None if it was not rejected.

        Args:
            windows: descriptions of all ranks' parts of the window.

        Raises:
            CheckpointError: the list of rejected windows cannot be read.
        """
        rejected = {entry.digest: entry.reason for entry in cls.read_all(run_dir)}
        # Compute the digest as ``SnapshotRestorer.find`` does.
        return rejected.get(window_digest([window_digest([each.to_bytes().decode()]) for each in windows]))


def window_digest(manifests: Sequence[str]) -> str:
    """Return a digest that identifies the content of a window, as 32 hexadecimal digits.

    It is the checksum of all ranks' manifests. A manifest contains the plan, the votes and a checksum of every piece.
    """
    # The manifests are in rank order and canonical JSON, so every restart computes the same digest for equal content.
    return xxhash.xxh3_128("\n".join(manifests).encode()).hexdigest()


_DIRECTORY = re.compile(r"window_(\d{7,19})(?:\.(\d{1,9}))?")
_FOLDER = "windows"
_SUPERSEDED_PREFIX = "superseded_"
_SHARED = ("run_id", "generation", "topology", "world_size", "start_iteration", "num_slices", "plan")
"""Fields of a window's description that must be equal in the files of all ranks."""


def persist_url(config: JobConfig, run_dir: Path) -> str:
    """Return the path or URL of the folder for this run's windows on storage."""
    url = config.snapshot.persist_url
    return str(run_dir / _FOLDER) if url is None else f"{url.rstrip('/')}/{run_dir.name}"


class WindowFolder:
    """Folder of a run's windows on storage. It is given as a path or URL."""

    def __init__(self, folder: Path | str) -> None:
        self._backend = open_backend(folder)

    def describe(self, stored: WindowKey) -> str:
        """Return the full path or URL of a window's directory."""
        return self._backend.describe(window_name(stored))

    def list_windows(self) -> list[WindowKey]:
        """Return the keys of all windows in the folder, complete or not, the oldest first."""
        found = []
        for match in filter(None, map(_DIRECTORY.fullmatch, self._backend.list_directories())):
            key = WindowKey(start_iteration=int(match[1]), generation=int(match[2] or 0))
            if window_name(key) == match[0]:  # skip names with other leading zeros
                found.append(key)
        return sorted(found)

    def open(self, stored: WindowKey, rank: int) -> WindowFile:
        """Open a rank's file of a window. Start iteration, generation and rank in the file must be those in its path.

        Raises:
            CheckpointError: the file is invalid, or its path does not fit its content.
        """
        expect = {"start_iteration": stored.start_iteration, "generation": stored.generation, "rank": rank}
        directory, name = window_name(stored), rank_name(rank)
        return WindowFile(
            self._backend.describe(directory, name),
            lambda: self._backend.open(directory, name),
            expect,
            lambda earlier: self.open(earlier, rank),
        )

    def verify(self, stored: WindowKey, world_size: int, *, part: int = 0, num_parts: int = 1) -> Window:
        """Check that a window is complete. Return the description of rank ``part``'s part of the window.

        Every caller opens the files of all ranks and compares their descriptions. Ranks can share the reading: each
        caller verifies the payload of only every ``num_parts``-th file, beginning with file ``part``.

        Raises:
            CheckpointError: a file is missing, damaged, or of another window; the message names the first such file.
        """
        windows: list[Window] = []
        for rank in range(world_size):
            with self.open(stored, rank) as opened:
                _check_same(opened.window, windows[0] if windows else opened.window, world_size, opened.path)
                # Callers share only the reading of payloads. Each needs all manifests, to check that the files match.
                windows.append(opened.verify() if rank % num_parts == part else opened.window)
        return windows[part]

    def newest(
        self, world_size: int, refuse: Callable[[Window], str | None] = lambda _: None
    ) -> tuple[WindowKey | None, list[DamageReport]]:
        """Return the newest complete window that ``refuse`` accepts, if any, and a report on each newer window.
        ``refuse`` returns None to accept a window, otherwise the reason to reject it."""
        return self._first_sound(self.list_windows()[::-1], world_size, refuse=refuse)

    def retain(self, num_windows: int, world_size: int, *, part: int = 0, num_parts: int = 1) -> list[WindowKey]:
        """Delete old windows. Keep the newest ``num_windows`` complete and undamaged windows, and every window newer
        than the oldest of them. Also keep windows whose files contain pieces that the file of a kept window omits.

        Nothing is deleted while fewer than ``num_windows`` windows are complete and undamaged. Only one process of the
        job may call this. ``part`` and ``num_parts`` limit the files whose payload is verified, as in :meth:`verify`.

        Returns:
            The deleted windows.

        Raises:
            CheckpointError: a window could not be deleted; the message names it.
        """
        assert num_windows >= 1, f"num_windows={num_windows}: must be at least 1"
        found, candidates = 0, self.list_windows()
        # Verify from the newest window on. Newer invalid windows stay, because ranks may still be writing them.
        while candidates and found < num_windows:
            stored, _ = self._first_sound([candidates.pop()], world_size, part, num_parts)
            found += stored is not None
        # If fewer than ``num_windows`` windows are valid, nothing is deleted.
        needed = self._needed_by(set(self.list_windows()) - set(candidates), world_size) if candidates else set()
        removed = [stored for stored in candidates if stored not in needed] if found == num_windows else []
        for stored in removed:
            self._delete(stored)
        return removed

    def _needed_by(self, kept: Iterable[WindowKey], world_size: int) -> set[WindowKey]:
        # Read all ranks' files: they can refer to different windows, because writing a file can fail on a rank.
        needed: set[WindowKey] = set()
        for stored in kept:
            for rank in range(world_size):
                try:
                    with self.open(stored, rank) as opened:
                        needed |= set(opened.earlier)
                except CheckpointError:
                    continue  # this file is missing or damaged, so it needs no other file
        return needed

    def set_aside_from(self, iteration: int) -> list[str]:
        """Rename all windows that start at ``iteration`` or later, so that they are not used. Return the new names.

        Call this before training resumes at ``iteration`` from a state that is in none of these windows. Training would
        otherwise write windows with the names of existing ones.
        """
        return self.set_aside([stored for stored in self.list_windows() if stored.start_iteration >= iteration])

    def set_aside(self, windows: Sequence[WindowKey]) -> list[str]:
        """Rename ``windows``, so that they no longer belong to the run. Return their new names."""
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

    @classmethod
    def of_run(cls, config: JobConfig, run_dir: Path) -> "WindowFolder | None":
        """Open the folder of this run's windows on storage. Return None if the run has no such folder."""
        if config.snapshot.persist_url is None and not (run_dir / _FOLDER).is_dir():
            return None
        return cls(persist_url(config, run_dir))


def _check_same(window: Window, first: Window, world_size: int, where: str) -> None:
    if window.world_size != world_size:
        raise CheckpointError(f"{where}: world_size={window.world_size}: must be {world_size}")
    # A folder may contain files of different captures. Each can be valid, but together they are not a state of the job.
    for name in _SHARED:
        if getattr(window, name) != getattr(first, name):
            raise CheckpointError(f"{where}: {name} differs from rank 0's file: the files belong to different windows")

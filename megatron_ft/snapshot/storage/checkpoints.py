"""Manages the folder of a run's checkpoints: names, completeness, the file ``latest``, damage and deletion.

::

    checkpoints/iter_0000030/        a checkpoint, complete if it contains a manifest
    checkpoints/iter_0000030.1/      the same iteration, saved again after the run had resumed from an earlier one
    checkpoints/damaged_iter_0000020 renamed by a job that found the checkpoint damaged
    checkpoints/foreign_iter_0000050 renamed, because it is of another run, or its name has the wrong iteration
    checkpoints/latest               JSON with the name of the newest complete checkpoint
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ft.errors import CheckpointError
from megatron_ft.serde import parse_json, read_bytes, reading
from megatron_ft.snapshot.storage.backends import TRASH_PREFIX, LocalBackend
from megatron_ft.snapshot.storage.files import fsync_directory, write_atomically
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest

LATEST_NAME = "latest"
MEGATRON_LATEST_NAME = "latest_checkpointed_iteration.txt"
"""Name of the file to which Megatron-LM writes the iteration of its newest checkpoint, or the word ``release``."""
RELEASE_NAME = "release"
"""Name of the directory in which Megatron-LM stores a checkpoint that belongs to no iteration."""
_MAX_TRACKER_BYTES = 64
_DIRECTORY = re.compile(r"iter_(\d{7,})(?:\.(\d{1,6}))?")
_SET_ASIDE_PREFIX = {"damaged": "damaged_", "foreign": "foreign_"}


@dataclass(frozen=True, slots=True, order=True)
class StoredCheckpoint:
    """Directory of a checkpoint. Objects are ordered by iteration, then by ``attempt``, the oldest first."""

    iteration: int
    attempt: int
    """Number of earlier complete saves of this iteration: 0 for its first save, 1 for its second save."""
    path: Path
    complete: bool
    """Whether the directory has a manifest. Files of a complete checkpoint can be damaged nevertheless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageReport:
    """A checkpoint or snapshot window that cannot be used, and the reason."""

    path: Path | str
    """Path of the checkpoint, or path or URL of the window."""
    reason: str


def directory_name(iteration: int, attempt: int = 0) -> str:
    """Return the name of the directory for a checkpoint of ``iteration``."""
    return f"iter_{iteration:07d}" + (f".{attempt}" if attempt else "")


def iteration_of(path: Path) -> int:
    """Return the iteration in the name of a checkpoint's directory.

    Raises:
        CheckpointError: the name is not that of a checkpoint.
    """
    match = _DIRECTORY.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path}: must be named like a checkpoint, e.g. {directory_name(30)}")
    return int(match[1])


def has_manifest(directory: Path, *, trust: bool, key: str = "checkpoint.load") -> bool:
    """Return whether ``directory``, a checkpoint that the configuration key ``key`` names, has a manifest.

    Raises:
        CheckpointError: the directory does not exist, or it has no manifest and ``trust`` is false.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{key}={directory}: must be an existing directory")
    found = (directory / MANIFEST_NAME).exists()
    if not found and not trust:
        raise CheckpointError(
            f"{directory} has no {MANIFEST_NAME} of this project, so its files cannot be verified; they contain "
            "pickle, which can run code when it is loaded. If you trust their origin, set checkpoint.trust=true"
        )
    return found


def is_named(path: Path) -> bool:
    """Return whether the name of a directory is that of a checkpoint, such as ``iter_0000030``."""
    return _DIRECTORY.fullmatch(path.name) is not None


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """List the checkpoint directories in ``folder``, complete or not, oldest first; empty if ``folder`` is missing."""
    if not folder.is_dir():
        return []
    found = []
    for entry in os.scandir(folder):
        match = _DIRECTORY.fullmatch(entry.name)
        # Skip links. Incomplete directories are deleted later, and a link could point to data outside the run's folder.
        if match and entry.is_dir(follow_symlinks=False):
            path = Path(entry.path)
            complete = (path / MANIFEST_NAME).is_file()
            found.append(StoredCheckpoint(int(match[1]), int(match[2] or 0), path, complete))
    return sorted(found)


def list_set_aside(folder: Path) -> list[Path]:
    """List the directories of checkpoints that earlier jobs found damaged and renamed. Empty if there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(
        path for path in folder.iterdir() if path.name.startswith(_SET_ASIDE_PREFIX["damaged"]) and path.is_dir()
    )


def start_directory(folder: Path, iteration: int) -> Path:
    """Create the directory for a checkpoint of ``iteration`` and return it.

    If an incomplete checkpoint of this iteration exists, it is deleted. If a complete one exists, it stays, and the
    new directory gets the next attempt number. Call ``sync_directory`` before the manifest is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    same = [stored for stored in list_checkpoints(folder) if stored.iteration == iteration]
    for stored in same:
        if not stored.complete:
            delete(stored.path)
    taken = [stored.attempt for stored in same if stored.complete]
    path = folder / directory_name(iteration, max(taken) + 1 if taken else 0)
    path.mkdir()
    return path


def sync_directory(path: Path) -> None:
    """Sync the directory of a checkpoint and the two directories above it. The files must have been synced before."""
    # A power failure could otherwise remove the directory together with its synced manifest.
    for directory in (path.parent.parent, path.parent, path):
        fsync_directory(directory)


def newest_valid(
    folder: Path, check: Callable[[Path], Manifest] = Manifest.verified
) -> tuple[Path | None, list[DamageReport]]:
    """Return the newest checkpoint that passes ``check``, if any, and a report on each newer checkpoint.

    A newer checkpoint is rejected if it fails ``check``, has no manifest because its save did not finish, or has
    different iterations in its name and its manifest.
    """
    reports = []
    for stored in reversed(list_checkpoints(folder)):
        if not stored.complete:
            reports.append(DamageReport(path=stored.path, reason="incomplete: no manifest"))
            continue
        try:
            reason = other_iteration(stored.path, check(stored.path))
        except CheckpointError as error:
            reason = str(error)
        if reason is None:
            return stored.path, reports
        reports.append(DamageReport(path=stored.path, reason=reason))
    return None, reports


def other_iteration(path: Path, manifest: Manifest) -> str | None:
    """Compare the iteration in the name of a checkpoint's directory with the iteration in its manifest. Return None if
    they are equal, otherwise a text about the difference."""
    named = iteration_of(path)
    if named == manifest.iteration:
        return None
    return (
        f"{path}: contains iteration {manifest.iteration}, not {named} as in its name: the directory was renamed, or "
        "its files were replaced"
    )


def move_latest(folder: Path, path: Path, iteration: int) -> None:
    """Atomically write the name of the checkpoint ``path`` to the file ``latest``. The checkpoint must be complete."""
    assert (path / MANIFEST_NAME).is_file(), f"{path}: cannot become latest without a manifest"
    content = json.dumps({"checkpoint": path.name, "iteration": iteration}) + "\n"
    write_atomically(folder, LATEST_NAME, content.encode())


def read_latest(folder: Path) -> Path | None:
    """Return the checkpoint that ``latest`` names, or None without this file. A damaged file raises CheckpointError."""
    path = folder / LATEST_NAME
    try:
        name = parse_json(path.read_bytes())["checkpoint"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if not isinstance(name, str) or not _DIRECTORY.fullmatch(name):
        raise CheckpointError(f"{path}: must name a checkpoint, not {name!r}")
    return folder / name


def newest_of_megatron(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder with the layout of Megatron-LM; None if ``folder`` has another layout.

    Raises:
        CheckpointError: the file that names the newest checkpoint is damaged. Or this checkpoint does not exist, or is
            not in Megatron's format ``torch_dist``.
    """
    tracker = folder / MEGATRON_LATEST_NAME
    if not os.path.lexists(tracker):
        return None
    with reading(tracker, CheckpointError):
        text = read_bytes(tracker, max_bytes=_MAX_TRACKER_BYTES, kind=CheckpointError).decode("ascii").strip()
    if text != RELEASE_NAME and not re.fullmatch(r"\d{1,18}", text):
        raise CheckpointError(f"{tracker}: must contain an iteration or {RELEASE_NAME!r}, not {text[:20]!r}")
    path = folder / (RELEASE_NAME if text == RELEASE_NAME else directory_name(int(text)))
    if not path.is_dir():
        raise CheckpointError(f"{tracker} names the checkpoint {path.name}, but this directory does not exist")
    if not (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path}: must be in Megatron's format torch_dist, but has no file .metadata; Megatron-LM can convert it "
            "with --ckpt-convert-format torch_dist"
        )
    return path


def set_aside(path: Path, kind: Literal["damaged", "foreign"] = "damaged") -> Path:
    """Rename the directory of a checkpoint so that it no longer belongs to the run. Its files stay unchanged.

    The file ``latest`` then names the newest remaining complete checkpoint. If there is none, ``latest`` is removed.
    """
    for attempt in range(1_000_000):
        target = path.with_name(f"{_SET_ASIDE_PREFIX[kind]}{path.name}" + (f"_{attempt}" if attempt else ""))
        if not target.exists():
            # After a crash here, ``latest`` names a missing directory. A resume does not use ``latest``.
            os.rename(path, target)
            fsync_directory(path.parent)
            _move_latest_back(path.parent)
            return target
    raise CheckpointError(f"{path}: cannot be renamed, because all new names are in use")


def _move_latest_back(folder: Path) -> None:
    complete = [stored for stored in list_checkpoints(folder) if stored.complete]
    if complete:
        move_latest(folder, complete[-1].path, complete[-1].iteration)
    else:
        (folder / LATEST_NAME).unlink(missing_ok=True)
        fsync_directory(folder)


def delete(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a crash leaves no partly deleted checkpoint."""
    LocalBackend(path.parent).delete(path.name)


def sweep(folder: Path, *, before_iteration: int) -> list[Path]:
    """Delete what unfinished saves and deletions have left: partly deleted directories, and incomplete checkpoints of
    ``before_iteration`` and earlier iterations. Return the deleted directories. Call this when a checkpoint of
    ``before_iteration`` is complete and no save is in progress."""
    removed = []
    for entry in list(os.scandir(folder)) if folder.is_dir() else []:
        if entry.name.startswith(TRASH_PREFIX) and entry.is_dir(follow_symlinks=False):
            # The deletion of this directory had begun, so files may be missing, and it cannot be used any more.
            shutil.rmtree(entry.path)
            removed.append(Path(entry.path))
    for stored in list_checkpoints(folder):
        if not stored.complete and stored.iteration <= before_iteration:
            delete(stored.path)
            removed.append(stored.path)
    return removed

"""Records the order in which files are written to disk."""

import errno
import os
from pathlib import Path

import pytest


def note_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record later steps in order: ``fsync NAME`` of a file or folder, ``rename NAME`` to a name. The suffix of
    temporary names, which begins with ``.tmp``, is left out.

    Of a temporary file it is the name without what ``.tmp`` begins.
    """
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        steps.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split(".tmp")[0])
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        steps.append("rename " + target.name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return steps


def fail_to_read(monkeypatch: pytest.MonkeyPatch, name: str, *, times: int, error: int = errno.EIO) -> list[str]:
    """Let the next ``times`` attempts to open a file with this name fail. Return the list to which each failed attempt
    adds the path of the file."""
    failed: list[str] = []
    open_file = os.open

    def open_or_fail(path: str | os.PathLike[str], *about: int) -> int:
        if Path(path).name == name and len(failed) < times:
            failed.append(os.fspath(path))
            raise OSError(error, os.strerror(error), os.fspath(path))
        return open_file(path, *about)

    monkeypatch.setattr(os, "open", open_or_fail)
    return failed

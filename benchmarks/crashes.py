"""Produces every state in which a crash may leave a disk: records system calls, then replays them in every way that
POSIX allows.

The disk is assumed to guarantee only what POSIX does. Bytes of a file are certain only after the file was synced;
before that, each of its pages may be present, zero or stale, or the file may end before the page. Names are certain
only after their directory was synced; before that, any combination of its changes may be missing. A rename is one
change.
"""

import copy
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

PAGE_BYTES = 4096
NUM_RANDOM_STATES = 6
"""Number of random combinations of unsynced changes that are tried for each prefix of the recorded calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """System call that changed the disk. Files and directories have numbers; 0 is the root."""

    call: str
    """One of ``link``, ``unlink``, ``write`` and ``sync``."""
    node: int
    """Directory whose names change, or file that is written or synced."""
    names: tuple[tuple[str, int | None], ...] = ()
    """Names that are set or, with None, removed by this call."""
    is_directory: bool = False
    """Whether the linked node is a directory."""
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Disk:
    """Files and directories of a disk, by number."""

    files: dict[int, bytearray] = field(default_factory=dict)
    directories: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})

    def apply(self, change: Change) -> None:
        """Make the change."""
        if change.call == "write":
            content = self.files.setdefault(change.node, bytearray())
            content.extend(bytes(max(0, change.offset + len(change.data) - len(content))))
            content[change.offset : change.offset + len(change.data)] = change.data
        elif change.call == "link":
            entries = self.directories.setdefault(change.node, {})
            for name, target in change.names:
                if target is None:
                    entries.pop(name, None)
                else:
                    entries[name] = target
                    if change.is_directory:
                        self.directories.setdefault(target, {})

    def write_to(self, folder: Path, node: int = 0) -> None:
        """Write the content of the disk as real files below ``folder``."""
        folder.mkdir(parents=True)
        for name, target in self.directories[node].items():
            if target in self.directories:
                self.write_to(folder / name, target)
            else:
                (folder / name).write_bytes(self.files.get(target, b""))


class Recorder:
    """Gives each file below ``root`` a number, and records every call that changes one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changes: list[Change] = []
        self.before = Disk()
        self._numbers: dict[int, int] = {os.stat(root).st_ino: 0}
        self._next = 1
        self._scan(root, 0)

    def _scan(self, folder: Path, number: int) -> None:
        for entry in sorted(folder.iterdir()):
            child = self._new(entry)
            self.before.directories[number][entry.name] = child
            if entry.is_dir():
                self.before.directories[child] = {}
                self._scan(entry, child)
            else:
                self.before.files[child] = bytearray(entry.read_bytes())

    def _new(self, path: Path) -> int:
        self._numbers[os.lstat(path).st_ino] = self._next
        self._next += 1
        return self._next - 1

    def _number(self, path: Path | int) -> int:
        return self._numbers[os.stat(path).st_ino]

    def _path(self, name: Any, dir_fd: int | None = None) -> Path:
        base = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        return base / name

    def _link(self, path: Path, target: int | None, **more: Any) -> None:
        names = ((path.name, target),)
        self.changes.append(Change(call="link", node=self._number(path.parent), names=names, **more))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls in the block."""
        names = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
        with mock.patch.multiple(os, **{name: self._wrap(name, getattr(os, name)) for name in names}):
            yield

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return getattr(self, f"_on_{name}")(call, *args, **kwargs)

        return wrapped

    def _on_open(self, call: Callable[..., Any], path: Any, flags: int, *args: Any, dir_fd: int | None = None) -> Any:
        descriptor = call(path, flags, *args, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL, f"{path}: cannot be recorded: only new files may be written"
            full = self._path(path, dir_fd)
            self._link(full, self._new(full))
        return descriptor

    def _on_write(self, call: Callable[..., Any], descriptor: int, data: Any) -> Any:
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        count = call(descriptor, data)
        node = self._number(descriptor)
        self.changes.append(Change(call="write", node=node, offset=offset, data=bytes(data[:count])))
        return count

    def _on_fsync(self, call: Callable[..., Any], descriptor: int) -> None:
        call(descriptor)
        self.changes.append(Change(call="sync", node=self._number(descriptor)))

    def _on_rename(self, call: Callable[..., Any], source: Any, target: Any) -> None:
        source, target = self._path(source), self._path(target)
        assert source.parent == target.parent, f"{source}: cannot be recorded: renamed to another directory"
        number = self._numbers[os.lstat(source).st_ino]
        call(source, target)
        names = ((source.name, None), (target.name, number))
        is_directory = target.is_dir()
        node = self._number(target.parent)
        self.changes.append(Change(call="link", node=node, names=names, is_directory=is_directory))

    def _on_mkdir(self, call: Callable[..., Any], path: Any, *args: Any) -> None:
        call(path, *args)
        full = self._path(path)
        self._link(full, self._new(full), is_directory=True)

    def _on_unlink(self, call: Callable[..., Any], path: Any, dir_fd: int | None = None) -> None:
        call(path, dir_fd=dir_fd)
        self._link(self._path(path, dir_fd), None)

    def _on_rmdir(self, call: Callable[..., Any], path: Any, dir_fd: int | None = None) -> None:
        call(path, dir_fd=dir_fd)
        self._link(self._path(path, dir_fd), None)


def crash_states(before: Disk, changes: list[Change], seed: int) -> Iterator[tuple[str, Callable[[], Disk]]]:
    """Yield every state in which a crash during ``changes`` may leave the disk.

    Yields (description, function that returns the disk). Call the function before the next iteration.
    """
    generator = random.Random(seed)
    durable = copy.deepcopy(before)
    pending: list[Change] = []
    for length in range(len(changes) + 1):
        for what, kept in _selections(pending, generator):
            yield f"{length} of {len(changes)} calls, {what}", partial(_with, durable, kept)
        if length < len(changes):
            pending = _advance(durable, pending, changes[length])


def _with(durable: Disk, changes: list[Change]) -> Disk:
    disk = copy.deepcopy(durable)
    for change in changes:
        disk.apply(change)
    return disk


def _advance(durable: Disk, pending: list[Change], change: Change) -> list[Change]:
    if change.call != "sync":
        return [*pending, change]
    for synced in (earlier for earlier in pending if earlier.node == change.node):
        durable.apply(synced)
    return [earlier for earlier in pending if earlier.node != change.node]


def _selections(pending: list[Change], generator: random.Random) -> Iterator[tuple[str, list[Change]]]:
    yield "nothing unsynced lost", pending
    if not pending:
        return
    yield "all unsynced lost", []
    for index, change in enumerate(pending):
        yield f"{change.call} {index} lost", pending[:index] + pending[index + 1 :]
        yield f"only {change.call} {index} kept", [change]
        if change.call == "write":
            for what, torn in _torn(change, generator):
                yield f"write {index} {what}", [*pending[:index], torn, *pending[index + 1 :]]
    for trial in range(NUM_RANDOM_STATES):
        yield f"random loss {trial}", [change for change in pending if generator.random() < 0.5]


def _torn(change: Change, generator: random.Random) -> Iterator[tuple[str, Change]]:
    """Yield variants of a write in which one page is missing, zero or stale."""
    data = change.data
    page = generator.randrange(-(-len(data) // PAGE_BYTES)) * PAGE_BYTES
    yield "cut at a page", _with_data(change, data[:page])
    for what, filler in (("zero page", bytes(PAGE_BYTES)), ("stale page", generator.randbytes(PAGE_BYTES))):
        end = min(page + PAGE_BYTES, len(data))
        yield what, _with_data(change, data[:page] + filler[: end - page] + data[end:])


def _with_data(change: Change, data: bytes) -> Change:
    return Change(call="write", node=change.node, offset=change.offset, data=data)


def torn_files(content: bytes, other: bytes) -> Mapping[str, bytes]:
    """Return damaged variants of a file: cut at or beside each page boundary, or with one page zero, stale or
    doubled."""
    damaged = {}
    for start in range(0, len(content) + PAGE_BYTES, PAGE_BYTES):
        for length in (start - 1, start, start + 1):
            if 0 <= length < len(content):
                damaged[f"cut at {length}"] = content[:length]
    for start in range(0, len(content), PAGE_BYTES):
        end = min(start + PAGE_BYTES, len(content))
        fillers = {"zero": bytes(end - start), "stale": other[start:end], "doubled": content[:PAGE_BYTES]}
        for what, filler in fillers.items():
            damaged[f"{what} page at {start}"] = content[:start] + filler + content[end:]
    return damaged

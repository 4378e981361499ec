"""The folder (mode 0700) for the sockets of a job's processes on one machine.

The name of every socket of a node contains the process id of its agent: ``003-4711.sock`` belongs to the agent,
``003-4711-keeper.sock`` to a sidecar. So two living processes never use the same path, and the paths of a new agent are
never taken by sockets of a killed agent.

Every process that uses the folder has a shared lock on a file in the folder. The kernel releases the lock when the
process ends in any way. The last process gets the lock exclusively and removes the folder, even if the process that
made the folder was killed. If all processes were killed at the same moment, the next job on the machine removes the
folder.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_ft.errors import ConfigError

_MAX_PARENT_BYTES = 55
"""Largest length of the path of the folder's parent. A socket's path has at most 107 bytes, including
``/megatron-ft-XXXXXXXX`` and the longest name of a socket."""
PREFIX = "megatron-ft-"
"""First part of the name of every folder for a job's sockets."""
_LOCK_FILE = ".in-use"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SOCKET = re.compile(r"(?P<node>[0-9]{3,})-(?P<process_id>[0-9]+)(-.+)?\.sock")


class Use:
    """Marks a socket folder as used by this process, until ``end`` is called or the process ends."""

    def __init__(self, path: Path) -> None:
        """Begin to use the folder. A folder without a lock file was not made by ``make_runtime_dir``, so ``end``
        removes it only if it is empty."""
        self._path = path
        self.descriptor: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self.descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
            # A flock(2) lock belongs to the open file: a forked child has it, too, until it closes its descriptor.
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def end(self) -> None:
        """End this process's use of the folder. If no other process uses the folder, remove it."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is None:
            with contextlib.suppress(OSError):  # it is not empty, or not there
                self._path.rmdir()
            return
        try:
            _remove_unused(self._path, descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def make_runtime_dir() -> Iterator[Path]:
    """Remove unused directories of earlier jobs from the folder of temporary files, and make a directory (mode 0700)
    for sockets there. At the end of the ``with`` block, remove the new directory if no other process uses it.

    Raises:
        ConfigError: the path of temporary files is too long for sockets.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
        reason = f"must have at most {_MAX_PARENT_BYTES} bytes: the job's sockets are made below it. Set TMPDIR=/tmp"
        raise ConfigError.of("TMPDIR", str(parent), reason)
    _remove_left_over(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    new = path / f"{_LOCK_FILE}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, _BOOT_ID.read_bytes())
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.rename(new, path / _LOCK_FILE)  # at this path, the file is locked from the beginning
        yield path
    finally:
        # A snapshot server that outlives the job still uses the folder, and removes it at its end.
        if not _is_used(descriptor):
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _is_used(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # its file system has no such locks
        return False
    return False


def _remove_left_over(parent: Path) -> None:
    # Remove unused folders of this boot only, because locks show only processes that run under the same kernel.
    for path in parent.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it has no lock file yet or at all, belongs to another user, or is gone
            continue
        try:
            if os.pread(descriptor, 64, 0) == _BOOT_ID.read_bytes():
                _remove_unused(path, descriptor)
        finally:
            os.close(descriptor)


def _remove_unused(path: Path, lock: int) -> None:
    try:
        # To convert the shared lock, flock(2) first releases it. So if two processes leave at once, the second one gets
        # the exclusive lock.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # others use it, or its file system has no such locks
        return
    shutil.rmtree(path, ignore_errors=True)


def socket_path(runtime_dir: Path, node: int, service: str = "") -> Path:
    """Return the socket path of this process, which is the agent of ``node``, or of its sidecar ``service``."""
    return runtime_dir / (f"{node:03d}-{os.getpid()}" + (f"-{service}" if service else "") + ".sock")


def remove_stale_sockets(runtime_dir: Path, node: int) -> None:
    """Remove the sockets of earlier agents of ``node`` and of their sidecars. Call this before the agent makes its own
    sockets.

    Only sockets of agents that have ended are removed. A sidecar may outlive its agent for a moment. Its socket is
    removed nevertheless, because no rank connects to this sidecar any more. Sockets of snapshot servers that stay for
    the next job have a record (``node/kept.py``) and are not removed.
    """
    for path in runtime_dir.glob("*.sock"):
        match = _SOCKET.fullmatch(path.name)
        if match is None or int(match["node"]) != node:
            continue
        process_id = int(match["process_id"])
        if path.with_suffix(".json").exists():
            continue
        if process_id == os.getpid() or not _is_alive(process_id):
            path.unlink(missing_ok=True)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True

"""Memory without a name in any file system: counted, limited before it is taken, there once it is.

Taking it lets other threads run, which mapping with ``MAP_POPULATE`` would not: ranks do that for themselves.
"""

import mmap
import os
import threading
import weakref
from pathlib import Path

from megatron_ft.errors import ControlError

_USABLE_SHARE = 0.9


class Segment:
    """A mapped memory file. It lives as long as somebody refers to it; a view of it keeps the bytes, not the file."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """Take ``num_bytes`` at once.

        Raises:
            OSError: the memory is not there.
        """
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        self.view = memoryview(mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED))

    def read_only_descriptor(self) -> int:
        """A new descriptor through which nobody can write."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class Memory:
    """All segments of a process. Safe to use from threads."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """``limit_bytes``: of all segments together; None: what the machine has available at each allocation."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.RLock()

    def allocate(self, name: str, num_bytes: int) -> Segment:
        """Take memory.

        Raises:
            ControlError: it would exceed the limit, or the machine refuses.
        """
        with self._lock:
            self._check(name, num_bytes)
            self.used_bytes += num_bytes
        try:
            segment = Segment(name, num_bytes)
        except OSError as error:
            self._give_back(num_bytes)
            raise ControlError(f"{name}: {num_bytes} bytes of memory: {error}") from error
        weakref.finalize(segment, self._give_back, num_bytes)
        return segment

    def _check(self, name: str, num_bytes: int) -> None:
        if self.limit_bytes is not None and self.used_bytes + num_bytes > self.limit_bytes:
            raise ControlError(
                f"{name}: {num_bytes} bytes: {self.used_bytes} are in use, at most {self.limit_bytes} may be "
                "(memory_limit_bytes of the keeper)"
            )
        available = available_bytes()
        if num_bytes > available * _USABLE_SHARE:
            raise ControlError(f"{name}: {num_bytes} bytes: the machine has {available} available")

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= num_bytes


def available_bytes() -> int:
    """Memory that can be taken without swapping, by the kernel's estimate.

    Source: proc_meminfo(5), ``MemAvailable``.
    """
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ControlError("/proc/meminfo has no MemAvailable: must be a Linux machine")

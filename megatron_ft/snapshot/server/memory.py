"""Memory files without a name: limited before they are allocated; all their pages are present afterwards.

Allocation lets other threads run, which mapping with ``MAP_POPULATE`` would not; ranks use the latter themselves.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from megatron_ft.errors import ControlError

# ``MemAvailable`` is an estimate, and beyond it the kernel kills processes, ranks among them.
_USABLE_SHARE = 0.9
_CHUNK_BYTES = 1 << 28
"""Number of bytes that one call allocates. Between calls, the rest of a segment counts as missing."""


class Segment:
    """A mapped memory file, closed with the last reference to it; a view of it keeps the bytes, not the file."""

    def __init__(self, name: str, num_bytes: int, on_allocated: Callable[[int], None]) -> None:
        """Allocate all pages. Raises OSError if there is not enough memory.

        Args:
            on_allocated: Called with the number of bytes allocated since the last call.
        """
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        for start in range(0, num_bytes, _CHUNK_BYTES):
            chunk_bytes = min(_CHUNK_BYTES, num_bytes - start)
            # A page that is missing later would be a SIGBUS in whichever process touches it.
            os.posix_fallocate(self.descriptor, start, chunk_bytes)
            on_allocated(chunk_bytes)
        self.view = memoryview(mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED))

    def read_only_descriptor(self) -> int:
        """Open the file again, for reading only."""
        # A duplicate would share the access mode: its receiver could change a window that others restore from.
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class Memory:
    """All segments of a process. Safe to use from threads."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Limit all segments together to ``limit_bytes``; None limits them to the available memory of the machine each
        time."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._missing_bytes = 0
        """Bytes of segments that are being allocated, as far as the machine still counts the pages as available."""
        # Reentrant: garbage collection can run ``_give_back`` in a thread that holds the lock.
        self._lock = threading.RLock()

    def allocate(self, name: str, num_bytes: int) -> Segment:
        """Allocate a segment. Raises ControlError if it exceeds the limit or the memory of the machine."""
        with self._lock:
            self._check(name, num_bytes)
            self.used_bytes += num_bytes
            self._missing_bytes += num_bytes
        missing_bytes = num_bytes

        def allocated(chunk_bytes: int) -> None:
            nonlocal missing_bytes
            missing_bytes -= chunk_bytes
            with self._lock:
                self._missing_bytes -= chunk_bytes

        try:
            # Outside the lock: touching all pages of a large segment takes seconds.
            segment = Segment(name, num_bytes, allocated)
        except OSError as error:
            allocated(missing_bytes)
            self._give_back(num_bytes)
            raise ControlError(f"{name}: cannot allocate {num_bytes} bytes: {error}") from error
        weakref.finalize(segment, self._give_back, num_bytes)
        return segment

    def _check(self, name: str, num_bytes: int) -> None:
        if self.limit_bytes is not None and self.used_bytes + num_bytes > self.limit_bytes:
            raise ControlError(
                f"{name}: cannot allocate {num_bytes} bytes: {self.used_bytes} are in use, the limit is "
                f"{self.limit_bytes} (memory_limit_bytes of the snapshot server)"
            )
        available = available_bytes()
        # Two threads that allocate at the same time must not both count on the same pages.
        if num_bytes > available * _USABLE_SHARE - self._missing_bytes:
            missing = f", of which {self._missing_bytes} are being allocated" if self._missing_bytes else ""
            raise ControlError(
                f"{name}: cannot allocate {num_bytes} bytes: the machine has only {available} available{missing}"
            )

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= num_bytes


def available_bytes() -> int:
    """Estimate the memory that can be allocated without swapping.

    Source: proc_meminfo(5), ``MemAvailable``.
    """
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ControlError("/proc/meminfo has no MemAvailable: this machine must run Linux")

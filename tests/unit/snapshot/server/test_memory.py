"""Tests the memory of the snapshot server: memory that is being allocated counts like allocated memory."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.snapshot.server import store as server_memory
from megatron_ft.snapshot.server.store import Memory

PAGE = os.sysconf("SC_PAGESIZE")
CHUNK = 4 * PAGE


class Gate:
    """Replacement for ``os.posix_fallocate`` that waits before its last chunk, and counts the allocated bytes."""

    def __init__(self) -> None:
        self.allocate = os.posix_fallocate
        self.has_come, self.opened = threading.Event(), threading.Event()
        self.num_bytes = 0

    def __call__(self, descriptor: int, start: int, num_bytes: int) -> None:
        if start + num_bytes == 8 * CHUNK:
            self.has_come.set()
            assert self.opened.wait(60), "timed out"
        self.allocate(descriptor, start, num_bytes)
        self.num_bytes += num_bytes


def test_memory_that_another_thread_allocates_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a machine without a limit: it counts pages as available until they are touched."""
    gate, memory = Gate(), Memory()
    monkeypatch.setattr(server_memory, "_CHUNK_BYTES", CHUNK, raising=False)
    monkeypatch.setattr(server_memory, "_available_bytes", lambda: 10 * CHUNK - gate.num_bytes)
    monkeypatch.setattr(os, "posix_fallocate", gate)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(memory.allocate, "first", 8 * CHUNK)
        assert gate.has_come.wait(60), "timed out"
        with pytest.raises(ControlError, match="second: .* bytes for allocations in progress"):
            memory.allocate("second", 2 * CHUNK)
        gate.opened.set()
        kept = first.result(60)
    assert memory.used_bytes == kept.num_bytes == 8 * CHUNK
    other = memory.allocate("third", CHUNK)
    assert memory.used_bytes == 9 * CHUNK
    del kept, other, first
    assert memory.used_bytes == 0


def test_an_allocation_that_failed_is_not_being_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, allocate = Memory(), os.posix_fallocate

    def fail(descriptor: int, start: int, num_bytes: int) -> None:
        if start:
            raise OSError(28, "No space left on device")
        allocate(descriptor, start, num_bytes)

    monkeypatch.setattr(server_memory, "_CHUNK_BYTES", CHUNK)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", fail)
        with pytest.raises(ControlError, match="No space left"):
            memory.allocate("arena", 8 * CHUNK)
    assert memory.used_bytes == 0
    monkeypatch.setattr(server_memory, "_available_bytes", lambda: 9 * CHUNK)
    assert memory.allocate("arena", 8 * CHUNK).num_bytes == 8 * CHUNK

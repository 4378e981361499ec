"""Tests that buffers are pinned and mapped exactly as long as they are needed."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ft.snapshot.capture.capture import WindowMemory
from megatron_ft.snapshot.server.client import Arena

PAGE = 4096
CPU = torch.device("cpu")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of this test's memory."""
    return f"memory of {request.node.name}"


def new_arena(name: str) -> Arena:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 4 * PAGE)
    return Arena(descriptor, window_bytes=PAGE, num_buffers=3, status_bytes=PAGE)


def num_mapped(name: str) -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum(name in line for line in maps)


@pytest.fixture
def driver(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the calls of the driver. A result of 1 means that it refuses."""
    calls: list[tuple[Any, ...]] = []

    def register(address: int, num_bytes: int, _: int) -> int:
        calls.append(("pin", address, num_bytes))
        return 0

    def unregister(address: int) -> int:
        assert num_mapped(name) == 1, "unmapped while pinned"
        calls.append(("unpin", address))
        return 0 if ("pin", address, PAGE) in calls else 1

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return calls


def test_buffers_are_the_arenas_until_they_are_given_back(name: str, driver: list[tuple[Any, ...]]) -> None:
    arena = new_arena(name)
    memory = WindowMemory(arena, CPU)
    memory.buffers[1].fill_(7)
    assert bytes(arena.buffer(1)) == b"\x07" * PAGE and num_mapped(name) == 1
    memory.release()
    assert num_mapped(name) == 0 and driver == []


def test_memory_that_is_used_is_not_unmapped(name: str) -> None:
    memory = WindowMemory(new_arena(name), CPU)
    part = memory.buffers[0].narrow(0, 16, 16)
    with pytest.raises(BufferError):
        memory.release()
    assert num_mapped(name) == 1
    del part, memory


def test_what_was_pinned_is_unpinned_before_it_is_unmapped(name: str, driver: list[tuple[Any, ...]]) -> None:
    memory = WindowMemory(new_arena(name), torch.device("cuda"))
    addresses = [buffer.data_ptr() for buffer in memory.buffers]
    assert driver == [("pin", address, PAGE) for address in addresses]
    memory.release()
    assert sorted(driver[3:]) == [("unpin", address) for address in sorted(addresses)]
    assert num_mapped(name) == 0


def test_a_driver_that_refuses_is_named(
    name: str, driver: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=lambda *_: 2)
    memory = WindowMemory(new_arena(name), torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    with pytest.raises(RuntimeError, match="cannot unpin 4096 bytes"):
        memory.release()
    with pytest.raises(RuntimeError, match="cannot pin 4096 bytes"):
        WindowMemory(new_arena(name), torch.device("cuda"))

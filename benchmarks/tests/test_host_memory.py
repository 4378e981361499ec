"""Processes are measured from outside, and growth is seen."""

import mmap
import os
import threading
from typing import Any

import pytest

from benchmarks.footprint import footprint, growth, mapped_bytes, memory_files
from benchmarks.host_memory import case_problems, soak_problems

SIZE = 1 << 20


def test_memory_files_are_counted_once_and_by_what_is_allocated() -> None:
    before = sum(memory_files(os.getpid()).values())
    descriptor = os.memfd_create("counted")
    second = os.dup(descriptor)
    try:
        os.ftruncate(descriptor, 4 * SIZE)
        os.posix_fallocate(descriptor, 0, SIZE)
        assert sum(memory_files(os.getpid()).values()) - before == SIZE
        mapping = mmap.mmap(descriptor, SIZE, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        assert mapped_bytes(os.getpid(), "Rss") == SIZE
        mapping.close()
        assert mapped_bytes(os.getpid(), "Rss") == 0
    finally:
        os.close(descriptor)
        os.close(second)


def test_threads_and_descriptors_of_a_process_are_seen() -> None:
    before, release = footprint(os.getpid()), threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    after = footprint(os.getpid())
    release.set()
    thread.join()
    os.close(descriptor)
    assert before is not None and after is not None
    assert after.num_threads == before.num_threads + 1
    assert after.num_descriptors == before.num_descriptors + 1


def test_growth_is_that_of_the_second_half() -> None:
    rising = [{"rss_bytes": max(0, index - 50) * 10} for index in range(100)]
    assert growth(rising)["rss_bytes"] == pytest.approx(490)
    settled = [{"rss_bytes": min(index, 40) * 10} for index in range(100)]
    assert growth(settled)["rss_bytes"] == 0


def soaked(**grown: float) -> dict[str, Any]:
    names = [f"{role} {number}" for role in ("rank", "keeper", "agent") for number in range(3)]
    none = {"rss_bytes": 0.0, "num_threads": 0.0, "num_descriptors": 0.0, "memfd_bytes": 0.0}
    return {
        "exit_code": 0,
        "iterations": 100,
        "window_iterations": 4,
        "windows_committed": 20,
        "problems": [],
        "processes": {"rank": 3, "keeper": 3, "agent": 3},
        "last": {name: {"rss_bytes": 10 << 20} for name in names},
        "growth": dict.fromkeys(names, none | grown),
    }


@pytest.mark.parametrize("figure", ["rss_bytes", "num_threads", "num_descriptors", "memfd_bytes"])
def test_growth_breaks_the_claim(figure: str) -> None:
    assert soak_problems(soaked(), num_iterations=100, rss_bytes=1 << 20) == []
    found = soak_problems(soaked(**{figure: float(2 << 20)}), num_iterations=100, rss_bytes=1 << 20)
    assert len(found) == 9 and figure in found[0]


def test_a_case_needs_a_close_prediction_and_a_refusal_that_starts_nothing() -> None:
    limit = {"exit_code": 2, "names_key": True, "left": [], "message": ""}
    row = {"error": 0.04, "predicted_bytes": 1, "held_bytes": 1, "window_iterations": 3, "limit": limit}
    assert case_problems("case", row) == []
    for worse in (
        {"error": 0.06},
        {"window_iterations": 2},
        {"limit": {**limit, "exit_code": 0}},
        {"limit": {**limit, "left": ["logs"]}},
    ):
        assert len(case_problems("case", row | worse)) == 1

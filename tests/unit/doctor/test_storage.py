"""Tests the checks of the run's file system: each finding appears with its cause and disappears without it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.doctor.storage import NUM_FLUSHES, StorageFacts, _mount_of
from tests.helpers.machines import GIB, NEEDS, STORAGE, judged

CAUSES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a folder of others": ({"failure": "[Errno 13] Permission denied", "flush_seconds": ()}, {}, "error", "Errno 13"),
    "memory": ({"file_system": "tmpfs"}, {}, "warning", "is in memory (tmpfs)"),
    "no barriers": ({"options": ("rw", "barrier=0")}, {}, "warning", "mounted with barrier=0"),
    "a library that lies": ({"preloaded": "/lib/libeatmydata.so"}, {}, "warning", "LD_PRELOAD=/lib/libeatmydata.so"),
    "too fast to be true": ({"flush_seconds": (2e-6, 3e-6, 0.5)}, {}, "warning", "no storage is so fast"),
    "no room for one": ({"free_bytes": 3 * GIB}, {}, "error", "one checkpoint needs 4.0 GiB"),
    "no room for all": ({"free_bytes": 12 * GIB}, {}, "warning", "may need 13.0 GiB"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_finding_appears_with_its_cause(cause: str) -> None:
    facts, needs, level, what = CAUSES[cause]
    (finding,) = judged(replace(STORAGE, **facts).check(replace(NEEDS, **needs)))
    assert (finding.level, what in finding.what) == (level, True), finding
    assert finding.fix


@pytest.mark.parametrize("facts", [{}, {"free_bytes": 13 * GIB}, {"options": ("rw", "barrier=1")}])
def test_and_goes_without(facts: dict[str, Any]) -> None:
    assert judged(replace(STORAGE, **facts).check(NEEDS)) == []


def test_what_it_costs_is_reported_and_not_judged() -> None:
    slow = replace(STORAGE, flush_seconds=(0.5, 2.0, 9.0)).check(NEEDS)
    assert judged(slow) == []
    assert any("2000.000 ms, the median of 3 syncs on ext4" in finding.what for finding in slow)


def test_a_job_that_saves_nothing_needs_no_room() -> None:
    needs = replace(NEEDS, num_checkpoints=0, persisted_bytes=0)
    assert judged(replace(STORAGE, free_bytes=0).check(needs)) == []


def test_a_folder_to_be_is_tried_above_and_left_clean(tmp_path: Path) -> None:
    facts = StorageFacts.observe(replace(NEEDS, run_dir=str(tmp_path / "runs" / "later")))
    assert facts.folder == str(tmp_path)
    assert (facts.failure, len(facts.flush_seconds)) == (None, NUM_FLUSHES)
    assert facts.file_system != "unknown"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said() -> None:
    facts = StorageFacts.observe(replace(NEEDS, run_dir="/proc/runs"))
    assert facts.failure is not None
    assert [finding.level for finding in facts.check(NEEDS)] == ["error"]


def test_a_path_is_on_its_deepest_mount() -> None:
    mountinfo = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n"
        "30 22 0:26 / /scratch\\040a rw - xfs /dev/sdb rw,nobarrier\n"
        "31 30 0:27 / /scratch\\040a/deep rw - tmpfs tmpfs rw,size=1k\n"
    )
    assert _mount_of(Path("/data"), mountinfo) == ("ext4", ("rw", "relatime", "rw", "errors=remount-ro"))
    assert _mount_of(Path("/scratch a/runs"), mountinfo)[0] == "xfs"
    assert _mount_of(Path("/scratch a/deep/er"), mountinfo)[0] == "tmpfs"
    assert _mount_of(Path("/scratch a2"), mountinfo)[0] == "ext4"

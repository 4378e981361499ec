"""Tests whole jobs of dummy ranks whose run folder is full or missing when a rank dies."""

import contextlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_ft.control.controller.main import FOLDER, JOURNAL
from megatron_ft.errors import EXIT_INTERRUPTED, ControlError
from megatron_ft.testing.jobs import start_dummy_job, wait
from tests.distributed.test_launch import LIMIT_SECONDS, assert_nothing_left, eventually, rank_process, records, started
from tests.distributed.test_lost_nodes import LAYOUT, decisions, finish, reformed

SMALL_BYTES = 32768
SPARE_BYTES = 16
"""Bytes by which the journals of two equal jobs may differ, because of the digits of numbers."""


@pytest.fixture
def small_disk(runs: Path) -> Iterator[Path]:
    """Create a file system of a few pages for the journal of a job."""
    folder = runs / "dummy" / FOLDER
    folder.mkdir(parents=True, mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES},mode=700", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill the file system. Return the file whose removal frees space again."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 512):
            pass
    return filler


def kinds(runs: Path) -> list[str]:
    return [record["kind"] for record in records(runs)]


def resume(runs: Path, iterations: int, *, padding: int = 0) -> "subprocess.Popen[str]":
    """Start a job that resumes the run in its folder. Nodes without a heartbeat for half a second are lost. ``padding``
    makes the journal longer by this number of bytes."""
    settings = {"recovery.position_timeout_seconds": 0.5, "training.train_iterations": iterations, "run.resume": "auto"}
    settings["telemetry.wandb_project"] = "p" * (1 + padding)
    job = start_dummy_job(runs, "run_surviving", overrides={**LAYOUT, **settings})
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    return job


def resume_with_a_full_page(runs: Path, iterations: int) -> "subprocess.Popen[str]":
    """Start a job as ``resume``. Its journal ends where a page ends: on a full disk, the rest of a page can still be
    written, and the rest of this page is too short for a decision."""
    trial = runs.with_name("x" * len(runs.name))  # the journal contains paths
    job = resume(trial, iterations)
    size = (trial / "dummy" / FOLDER / JOURNAL).stat().st_size
    for _ in range(2):
        os.kill(job.pid, signal.SIGINT)
        time.sleep(0.1)
    wait(job, LIMIT_SECONDS)
    return resume(runs, iterations, padding=-(size + SPARE_BYTES) % mmap.PAGESIZE)


def test_a_recovery_waits_for_room_on_a_full_disk_and_loses_nobody_else(runs: Path, small_disk: Path) -> None:
    job = resume_with_a_full_page(runs, 400)
    filler = fill(small_disk)
    rank_process(runs, 3).kill()
    eventually(lambda: "controller_waits" in kinds(runs), "it says why it does nothing")
    time.sleep(1.0)  # longer than any heartbeat timeout
    filler.unlink()
    eventually(lambda: "controller_goes_on" in kinds(runs), "the controller continues")
    finish(runs, job)
    (waits,) = [record["problem"] for record in records(runs) if record["kind"] == "controller_waits"]
    assert "No space left on device" in waits
    assert (reformed(runs, 1).nodes, len(decisions(runs))) == ((0, 0, 2, 2), 1), "no other node was lost"
    assert "controller_replaced" not in kinds(runs)
    lines = (small_disk / JOURNAL).read_text().splitlines()
    assert [json.loads(line)["order"]["op"] for line in lines if "order" in line][1:] == ["break", "reform", "end"]


def test_ctrl_c_twice_ends_a_job_that_waits_for_room(runs: Path, small_disk: Path) -> None:
    job = resume_with_a_full_page(runs, 100000)
    fill(small_disk)
    rank_process(runs, 3).kill()
    eventually(lambda: "controller_waits" in kinds(runs), "it says why it does nothing")
    for _ in range(2):
        os.kill(job.pid, signal.SIGINT)
        time.sleep(0.1)  # two signals of a kind at one instant are one
    finish(runs, job, EXIT_INTERRUPTED)


def test_a_deleted_run_folder_is_reported_and_the_next_death_ends_the_job_with_that_reason(runs: Path) -> None:
    job = resume(runs, 100000)
    rank = rank_process(runs, 3)
    reported = (runs / "dummy" / "records.jsonl").open()
    gone = (runs / "dummy").rename(runs / "gone")  # at once: deleting file by file races with who writes there
    shutil.rmtree(gone, ignore_errors=True)
    # A decision that was still to be written has ended the job by itself, for the same reason and before the event.
    eventually(
        lambda: "run_folder_missing" in reported.read() or job.poll() is not None, "it is reported, or the job ends"
    )
    begin = time.monotonic()
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.kill()
    output = wait(job, LIMIT_SECONDS)
    seconds = time.monotonic() - begin
    reported.close()
    assert job.returncode == ControlError.exit_code, output
    assert f"THE JOB FAILED: the run's folder {runs / 'dummy'} was deleted or moved away while the job ran" in output
    assert "Traceback" not in output
    assert seconds < 10.0, "nothing is waited for"
    assert_nothing_left(runs)

"""Tests snapshot servers that outlive their job: the next job of the run continues from their memory with the bits of
an undisturbed run, and nothing is left behind after their time."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.framing import FrameReader, send
from megatron_ft.testing.jobs import REPOSITORY, JobResult, start
from tests.distributed.test_launch import eventually
from tests.distributed.test_snapshots import LAYOUT, MODEL, SNAPSHOTS, digests, losses, of_kind, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HANG = 'delay(at_iteration=12,phase="forward",generation=0,seconds=300)'
SERVER = "megatron_ft.snapshot.server"


@pytest.fixture(autouse=True)
def _no_server_is_left(short_tmpdir: Path) -> Iterator[None]:
    """Kill servers that a failed test has left."""
    yield
    for server in servers(short_tmpdir):
        with contextlib.suppress(psutil.NoSuchProcess):
            server.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> JobResult:
    job = train(tmp_path_factory.mktemp("undisturbed"), warm_forkserver, *LAYOUT)
    assert job.exit_code == 0, job.output
    return job


def servers(folder: Path) -> list[psutil.Process]:
    """Return the snapshot servers of jobs whose runtime folder is below ``folder``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if SERVER in process.cmdline() and process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def kept(folder: Path) -> list[dict[str, Any]]:
    """Return the records of servers."""
    return [json.loads(path.read_bytes()) for path in sorted(folder.glob("megatron-ft-*/*-keeper.json"))]


def begin(runs: Path, forkserver: str, *overrides: str) -> "subprocess.Popen[str]":
    """Start a job whose ranks hang in iteration 12, and return it when they do and a window is committed."""
    words = [*MODEL, *LAYOUT, *SNAPSHOTS, f"testing.failpoints=['{HANG}']", "run.name=job", f"run.dir={runs}"]
    words += [f"launch.forkserver_socket={forkserver}", *overrides]
    job = start([sys.executable, str(REPOSITORY / "pretrain_moe.py"), *words])
    events, hits = runs / "job" / "events.jsonl", runs / "job" / "failpoints.jsonl"
    num_before = num_lines(hits)
    eventually(lambda: num_lines(hits) == num_before + 2 or job.poll() is not None, "both ranks wait", 120)
    assert job.poll() is None, job.communicate()[0]
    assert "window_committed" in events.read_text()
    return job


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def kill_all(job: "subprocess.Popen[str]") -> None:
    """Kill the launcher, the controller and the agents at one moment."""
    processes = [psutil.Process(job.pid)]
    processes += [child for child in processes[0].children(recursive=True) if SERVER not in child.cmdline()]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        process.kill()
    job.communicate(timeout=30)


def resume(runs: Path, forkserver: str, *overrides: str) -> JobResult:
    return train(runs, forkserver, *LAYOUT, *SNAPSHOTS, "run.resume=auto", *overrides)


def ends(processes: Sequence[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not alive


def test_a_job_whose_processes_were_all_killed_goes_on_from_memory(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult, short_tmpdir: Path
) -> None:
    key = "snapshot.outlive_job_seconds=200"
    kill_all(begin(tmp_path, warm_forkserver, key))
    before = servers(short_tmpdir)
    assert len(before) == 2 and len(kept(short_tmpdir)) == 2
    assert not list((tmp_path / "job" / "checkpoints").iterdir()) and not (tmp_path / "job" / "windows").exists()
    # A second job is killed, too, and the third one continues from the same servers.
    kill_all(begin(tmp_path, warm_forkserver, key, "run.resume=auto"))
    assert [server.pid for server in servers(short_tmpdir)] == [server.pid for server in before]
    job = resume(tmp_path, warm_forkserver, key)
    assert job.exit_code == 0, job.output
    chosen = [(event["strategy"], event["source"]) for event in of_kind(job, "recovery_started")]
    assert chosen == [("rollback", "memory")] * 2
    assert all(event["iteration"] > 0 for event in of_kind(job, "recovery_started"))
    assert digests(job) == digests(undisturbed) and losses(job) == losses(undisturbed)
    # The run has finished, so no job needs the windows.
    assert ends(before, 20)
    assert not list(short_tmpdir.glob("megatron-ft-*"))


@pytest.mark.extended
def test_a_server_ends_and_leaves_nothing_when_its_time_is_over(
    tmp_path: Path, warm_forkserver: str, short_tmpdir: Path
) -> None:
    job = begin(tmp_path, warm_forkserver, "snapshot.outlive_job_seconds=3")
    left = servers(short_tmpdir)
    kill_all(job)
    began = time.monotonic()
    assert ends(left, 30)
    assert time.monotonic() - began >= 2.5
    assert not list(short_tmpdir.glob("megatron-ft-*"))
    resumed = resume(tmp_path, warm_forkserver)
    assert resumed.exit_code == 0, resumed.output
    assert [event["iteration"] for event in of_kind(resumed, "recovery_started")] == [0]


@pytest.mark.extended
def test_a_server_serves_only_its_job(tmp_path: Path, warm_forkserver: str, short_tmpdir: Path) -> None:
    kill_all(begin(tmp_path, warm_forkserver, "snapshot.outlive_job_seconds=200"))
    left = servers(short_tmpdir)
    (first, _) = kept(short_tmpdir)
    (path, _) = sorted(short_tmpdir.glob("megatron-ft-*/*-keeper.json"))
    assert path.stat().st_mode & 0o777 == 0o600
    about = {"new_token": "n" * 64, "run_id": first["run_id"], "fingerprint": "f", "interface": "127.0.0.1"}
    assert "wrong or missing token" in ask(first, {"op": "adopt", "token": "w" * 64, **about})
    assert "wrong or missing token" in ask(first, {"op": "end", "token": "", "reason": "because"})
    # Another run does not touch the servers.
    other = train(tmp_path / "other", warm_forkserver, *LAYOUT, *SNAPSHOTS, "snapshot.outlive_job_seconds=5")
    assert other.exit_code == 0, other.output
    assert [server.pid for server in servers(short_tmpdir)] == [server.pid for server in left]
    # A job of the run with another layout cannot use the windows: each server refuses it and ends.
    layout = [*LAYOUT, "launch.ranks_per_node=2"]
    words = [*layout, *SNAPSHOTS, "run.resume=auto", "snapshot.outlive_job_seconds=5"]
    changed = train(tmp_path, warm_forkserver, *words)
    assert changed.exit_code == 0, changed.output
    assert ends(left, 20)
    for node in (0, 1):
        log = (tmp_path / "job" / "logs" / f"node-{node:03d}.log").read_text()
        assert log.count("cannot be taken over and is ended: it refused: fingerprint=") == 1
    assert not list(short_tmpdir.glob("megatron-ft-*"))


def ask(record: dict[str, Any], message: dict[str, Any]) -> str:
    """Send a message to a server, and return the reason of its refusal."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(record["socket_path"])
        send(sock, message)
        (answer,), _ = FrameReader(sock).pump()
    return str(answer["reason"])


@pytest.mark.extended
def test_a_start_without_the_key_ends_servers_of_earlier_jobs(
    tmp_path: Path, warm_forkserver: str, short_tmpdir: Path
) -> None:
    kill_all(begin(tmp_path, warm_forkserver, "snapshot.outlive_job_seconds=200"))
    left = servers(short_tmpdir)
    assert len(left) == 2
    os.kill(left[1].pid, signal.SIGSTOP)  # one that cannot end by itself is killed
    job = resume(tmp_path, warm_forkserver)
    assert job.exit_code == 0, job.output
    assert ends(left, 5)
    assert not list(short_tmpdir.glob("megatron-ft-*"))

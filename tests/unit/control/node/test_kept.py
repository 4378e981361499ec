"""Tests how an agent finds snapshot servers of earlier jobs. A process without a server stands for one that hangs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.control.node import kept
from megatron_ft.control.node.kept import KeptServers
from megatron_ft.control.runtime_dir import make_runtime_dir
from megatron_ft.errors import ControlError

SERVERS = KeptServers(seconds=60, run_id="a" * 32, fingerprint="f", first_generation=0)
TOKEN, NEXT_TOKEN = "t" * 64, "n" * 64


@pytest.fixture
def folder(short_tmpdir: Path) -> Iterator[Path]:
    """Return the folder of sockets of an earlier job, which was killed."""
    with make_runtime_dir() as path:
        yield path


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


def record(folder: Path, process_id: int, node: int = 3, **changes: object) -> Path:
    """Write the record of a server, with changed fields."""
    socket_path = folder / f"{node:03d}-77-keeper.sock"
    about = {"process_id": process_id, "socket_path": socket_path, "address": "127.0.0.1:9"}
    kept.write_record(SERVERS, node, token=TOKEN, **about)  # type: ignore[arg-type]
    path = kept.record_path(socket_path)
    if changes:
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))
    return path


def take_over(servers: KeptServers = SERVERS) -> object:
    return kept.take_over(servers, 3, token=NEXT_TOKEN, interface="127.0.0.1")


def test_a_server_that_does_not_answer_is_killed(
    folder: Path, process: "subprocess.Popen[bytes]", capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_END_SECONDS", 0.2)
    path = record(folder, process.pid)
    assert path.stat().st_mode & 0o777 == 0o600
    assert take_over() is None
    assert process.wait(10) == -9 and not path.exists()
    printed = capfd.readouterr().err
    assert printed.count("cannot be taken over and is ended") == 1 and printed.count("was killed") == 1


@pytest.mark.parametrize("difference", [{"run_id": "b" * 32}, {"node": 4}, {"token": 5}])
def test_servers_of_other_runs_and_nodes_are_not_touched(
    difference: dict[str, object], folder: Path, process: "subprocess.Popen[bytes]"
) -> None:
    path = record(folder, process.pid, **difference)
    assert take_over() is None
    assert process.poll() is None and path.exists()


def test_servers_that_no_node_of_the_next_job_uses_are_ended(
    folder: Path, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of their node has moved to another machine. Servers of this job and of other runs stay."""
    monkeypatch.setattr(kept, "_UNUSED_END_SECONDS", 0.2)
    for difference in ({"run_id": "b" * 32}, {"token": NEXT_TOKEN}):
        path = record(folder, process.pid, node=4, **difference)
        kept.end_unused(SERVERS, token=NEXT_TOKEN)
        assert process.poll() is None and path.exists()
    path = record(folder, process.pid, node=4)
    kept.end_unused(SERVERS, token=NEXT_TOKEN)
    assert process.wait(10) == -9 and not path.exists()


def test_a_server_that_an_agent_takes_over_at_this_moment_is_not_ended(
    folder: Path, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(folder, process.pid)

    def refuse(*_: object) -> None:
        raise ControlError("it refused: wrong or missing token")

    monkeypatch.setattr(kept, "_ask", refuse)
    kept.end_unused(SERVERS, token=NEXT_TOKEN)
    assert process.poll() is None and path.exists()


def test_memory_of_servers_of_the_run_is_counted(folder: Path) -> None:
    code = "import os, time; os.ftruncate(os.memfd_create('arena'), 12345); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline()
        record(folder, started.pid)
        assert kept.held_bytes(SERVERS.run_id) == 12345
        assert kept.held_bytes("b" * 32) == 0
        started.kill()
        started.wait()
        assert kept.held_bytes(SERVERS.run_id) == 0


def test_a_record_that_others_can_read_is_not_used(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    path = record(folder, process.pid)
    path.chmod(0o644)
    assert take_over() is None
    assert process.poll() is None and path.exists()


def test_another_process_with_the_recorded_number_is_not_touched(
    folder: Path, process: "subprocess.Popen[bytes]"
) -> None:
    path = record(folder, process.pid)
    ticks = json.loads(path.read_bytes())["start_ticks"]
    assert abs(ticks / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    record(folder, process.pid, start_ticks=ticks - 1)
    assert take_over() is None
    assert process.poll() is None
    assert not path.exists(), "the server has ended, so its record is removed"

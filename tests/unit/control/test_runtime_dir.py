"""Tests the folder of sockets, and which sockets a starting agent may remove."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.control.runtime_dir import Use, make_runtime_dir, remove_stale_sockets, socket_path
from megatron_ft.errors import ConfigError


@pytest.fixture(autouse=True)
def parent(short_tmpdir: Path) -> Path:
    """Return the parent of the folders of sockets."""
    return short_tmpdir


def ended_process_id() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def listen(path: Path) -> None:
    """Create a socket file that no process serves."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_a_path_that_is_too_long_for_sockets_is_refused_by_name(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest, too_long = (parent / ("x" * (55 - len(str(parent)) - 1 + more)) for more in (0, 1))
    for path in (longest, too_long):
        path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longest))
    with make_runtime_dir() as path:
        listen(path / "9999-4194304-longest-name.sock")
    monkeypatch.setattr(tempfile, "tempdir", str(too_long))
    with pytest.raises(ConfigError, match="TMPDIR=.*at most 55 bytes"), make_runtime_dir():
        pass


def test_sockets_of_a_node_are_apart_by_agent_and_service(tmp_path: Path) -> None:
    paths = {socket_path(tmp_path, 3), socket_path(tmp_path, 3, "keeper"), socket_path(tmp_path, 4)}
    assert {path.name for path in paths} == {f"003-{os.getpid()}{end}" for end in (".sock", "-keeper.sock")} | {
        f"004-{os.getpid()}.sock"
    }


def test_only_sockets_of_dead_agents_of_the_same_node_are_removed(parent: Path) -> None:
    dead, living = ended_process_id(), os.getppid()
    stale = [f"003-{dead}.sock", f"003-{dead}-keeper.sock", f"003-{os.getpid()}-keeper.sock"]
    kept = [f"003-{living}.sock", f"003-{living}-keeper.sock", f"004-{dead}.sock", "forkserver.sock"]
    for name in (*stale, *kept):
        listen(parent / name)
    remove_stale_sockets(parent, 3)
    assert sorted(path.name for path in parent.iterdir()) == sorted(kept)


MAKER = """
import sys
from megatron_ft.control.runtime_dir import make_runtime_dir
with make_runtime_dir() as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def maker(parent: Path) -> Iterator["subprocess.Popen[str]"]:
    """Return a process that makes a folder, prints its path, and uses it until its standard input closes."""
    environment = {**os.environ, "TMPDIR": str(parent)}
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def path_made_by(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_the_folder_goes_with_its_maker_whatever_it_holds(parent: Path) -> None:
    with make_runtime_dir() as path:
        assert path.stat().st_mode & 0o777 == 0o700
        listen(path / "forkserver.sock")
    assert list(parent.iterdir()) == []


def test_the_last_process_that_leaves_removes_the_folder_of_a_killed_one(maker: "subprocess.Popen[str]") -> None:
    path = path_made_by(maker)
    first, last = Use(path), Use(path)
    listen(path / "003-1-keeper.sock")
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait()
    first.end()
    assert path.exists(), "another process uses it"
    last.end()
    assert not path.exists()


def test_who_leaves_before_its_maker_removes_nothing(maker: "subprocess.Popen[str]") -> None:
    path = path_made_by(maker)
    Use(path).end()
    assert path.exists()
    maker.communicate("")
    assert not path.exists()


def test_a_folder_that_somebody_else_made_is_kept_unless_it_is_empty(parent: Path) -> None:
    warm = parent / "warm"
    warm.mkdir()
    (warm / "notes").touch()
    Use(warm).end()
    assert (warm / "notes").exists()
    (warm / "notes").unlink()
    Use(warm).end()
    assert not warm.exists()


def test_the_next_job_removes_what_nobody_uses_and_nothing_else(maker: "subprocess.Popen[str]", parent: Path) -> None:
    used = path_made_by(maker)
    left_over, foreign, other_kernel = (parent / f"megatron-ft-{name}" for name in ("left", "foreign", "kernel"))
    for path in (left_over, foreign, other_kernel):
        path.mkdir()
        listen(path / "forkserver.sock")
    (left_over / ".in-use").write_bytes((used / ".in-use").read_bytes())
    (other_kernel / ".in-use").write_text("another boot")
    with make_runtime_dir() as path:
        assert set(parent.iterdir()) == {used, foreign, other_kernel, path}

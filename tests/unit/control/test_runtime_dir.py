"""The folder of sockets: which of them an agent that starts may remove."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from megatron_ft.control.runtime_dir import remove_stale_sockets, socket_path


def ended_process_id() -> int:
    """Of a process that was there and has been waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def listen(path: Path) -> None:
    """Leave a socket behind that nobody serves."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_sockets_of_a_node_are_apart_by_agent_and_service(tmp_path: Path) -> None:
    paths = {socket_path(tmp_path, 3), socket_path(tmp_path, 3, "keeper"), socket_path(tmp_path, 4)}
    assert {path.name for path in paths} == {f"003-{os.getpid()}{end}" for end in (".sock", "-keeper.sock")} | {
        f"004-{os.getpid()}.sock"
    }


def test_only_sockets_of_dead_agents_of_the_same_node_are_removed(tmp_path: Path) -> None:
    dead, living = ended_process_id(), os.getppid()
    stale = [f"003-{dead}.sock", f"003-{dead}-keeper.sock", f"003-{os.getpid()}-keeper.sock"]
    kept = [f"003-{living}.sock", f"003-{living}-keeper.sock", f"004-{dead}.sock", "forkserver.sock"]
    for name in (*stale, *kept):
        listen(tmp_path / name)
    remove_stale_sockets(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)

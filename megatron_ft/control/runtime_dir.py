"""The folder of mode 0700 that holds the sockets of a job's processes on one machine.

Every socket of a node bears the process id of the agent that it belongs to: ``003-4711.sock`` is the agent's own,
``003-4711-keeper.sock`` that of a service. So the processes of a node that is started again never meet a socket that
its killed predecessor left behind, and two that live at the same time never share one.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SOCKET = re.compile(r"(?P<node>[0-9]{3,})-(?P<process_id>[0-9]+)(-.+)?\.sock")


@contextlib.contextmanager
def make_runtime_dir() -> Iterator[Path]:
    """A directory of mode 0700 for sockets, short enough for their 108 bytes."""
    path = Path(tempfile.mkdtemp(prefix="megatron-ft-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def socket_path(runtime_dir: Path, node: int, service: str = "") -> Path:
    """Where this process, as the agent of ``node``, or one of its services listens."""
    return runtime_dir / (f"{node:03d}-{os.getpid()}" + (f"-{service}" if service else "") + ".sock")


def remove_stale_sockets(runtime_dir: Path, node: int) -> None:
    """Remove the sockets of earlier agents of ``node`` and of their services; for an agent that has none yet.

    Only sockets of agents that have ended are removed. A service may outlive its agent for a moment; nobody connects
    to it any more, because ranks of the node end with the agent.
    """
    for path in runtime_dir.glob("*.sock"):
        match = _SOCKET.fullmatch(path.name)
        if match is None or int(match["node"]) != node:
            continue
        process_id = int(match["process_id"])
        if process_id == os.getpid() or not _is_alive(process_id):
            path.unlink(missing_ok=True)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True

"""Snapshot servers that outlive their agent, so that the run's next job on this machine continues from their memory.

An agent leaves a record (a file with mode 0600) beside the server's socket. The record names the server's process and
address, and the token with which the server can be taken over. The agent of the next job finds the record in the folder
of temporary files, and checks that the process is the recorded one. The server checks the token. The server ends if its
run, layout or address differs from that of the next job.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.control.runtime_dir import PREFIX, Use
from megatron_ft.control.secret_file import read_secret, write_secret
from megatron_ft.errors import ControlError
from megatron_ft.framing import FrameReader, Message, send
from megatron_ft.serde import decode, encode, parse_json

NAME = "keeper"
"""Name of the sidecar that can outlive its agent: the snapshot server."""
_ANSWER_SECONDS = 10.0
_END_SECONDS = 10.0
_UNUSED_END_SECONDS = 2.0
"""Time for unused servers to end. It is short, because the controller waits for the agent during this time."""
_START_TIME_FIELD = 19
"""Index of a process's start time among the fields after the command in ``/proc/PID/stat``; field 22 in proc(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptServers:
    """Time for which this job's snapshot servers outlive the job, and servers of earlier jobs that it can take over."""

    seconds: int
    """Seconds for which servers outlive their agents. If 0, servers of earlier jobs are ended and not taken over."""
    run_id: str
    fingerprint: str
    """Hash of layout, model, precision and optimizer. A later job can use the windows only if it has the same hash."""
    first_generation: int
    """Number that this job adds to generation numbers in its windows, so that they exceed those of earlier jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """Content of the record from which the run's next job finds and takes over a snapshot server."""

    run_id: str
    node: int
    process_id: int
    start_ticks: int
    """Start time of the process, in clock ticks since the machine has started."""
    socket_path: str
    address: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A snapshot server of an earlier job that this job has taken over."""

    process_id: int
    socket_path: Path
    address: str
    connection: socket.socket
    """Connection to the server. When the connection closes, the server assumes that the agent has ended."""


def record_path(socket_path: Path) -> Path:
    """Return the path of the record of the server that listens at ``socket_path``."""
    return socket_path.with_suffix(".json")


def write_record(kept: KeptServers, node: int, *, process_id: int, socket_path: Path, address: str, token: str) -> None:
    """Write the record from which the run's next job finds and takes over a running snapshot server."""
    start_ticks = _start_ticks(process_id)
    if start_ticks is None:
        return  # the server has ended, which its agent notices
    record = _Record(
        run_id=kept.run_id,
        node=node,
        process_id=process_id,
        start_ticks=start_ticks,
        socket_path=str(socket_path),
        address=address,
        token=token,
    )
    write_secret(record_path(socket_path), json.dumps(encode(record)).encode() + b"\n")


def take_over(kept: KeptServers, node: int, *, token: str, interface: str) -> Adopted | None:
    """Take over the server that an earlier job of the run has left for this node. End the node's other servers.

    Args:
        token: token of this job, which the server accepts from now on.
        interface: address at which the server must listen for servers of other nodes.

    Returns:
        None if there is no server that this job can use.
    """
    adopted = None
    for path, record in _records(kept.run_id, node):
        # A server with this job's token is from a lost agent of this job. Its windows count as lost, so it is ended.
        is_wanted = adopted is None and kept.seconds > 0 and record.token != token
        if is_wanted:
            adopted = _adopt(kept, record, token=token, interface=interface)
        if adopted is None or adopted.process_id != record.process_id:
            with contextlib.suppress(ControlError, OSError):
                _request_end(record, "the next job of the run does not use it", seconds=_ANSWER_SECONDS)
            _wait_or_kill(path, record, seconds=_END_SECONDS)
    if adopted is not None:
        write_record(
            kept,
            node,
            process_id=adopted.process_id,
            socket_path=adopted.socket_path,
            address=adopted.address,
            token=token,
        )
    return adopted


def end_unused(kept: KeptServers, *, token: str) -> None:
    """End the run's snapshot servers on this machine, except those that this job's agents have taken over. A server
    stays unused e.g. if its node now runs on another machine. Call this before ranks allocate memory for windows."""
    for path, record in _records(kept.run_id):
        if record.token == token:
            continue
        try:
            _request_end(record, "no node of the run's next job uses it", seconds=_UNUSED_END_SECONDS)
        except ControlError:
            continue  # an agent has taken it over, and has not written its record yet
        except OSError as error:
            _print(record, f"does not answer: {error}")
        _wait_or_kill(path, record, seconds=_UNUSED_END_SECONDS)


def held_bytes(run_id: str) -> int:
    """Return the size in bytes of all memory files of snapshot servers that jobs of the run left on this machine."""
    sizes = 0
    for _, record in _records(run_id):
        # A process that ends meanwhile has given its memory back.
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{record.process_id}/fd").iterdir():
                if os.readlink(descriptor).startswith("/memfd:"):
                    sizes += descriptor.stat().st_size
    return sizes


def _records(run_id: str, node: int | None = None) -> Iterator[tuple[Path, _Record]]:
    # Yields the records of living servers of the run, and removes the records of servers that have ended.
    prefix = "*" if node is None else f"{node:03d}"
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{prefix}-*-{NAME}.json")):
        try:
            record = decode(_Record, parse_json(read_secret(path)))
        except (ControlError, OSError, ValueError):  # of another user, damaged, or gone meanwhile
            continue
        if record.run_id != run_id or node not in (None, record.node):
            continue
        if _start_ticks(record.process_id) == record.start_ticks:
            yield path, record
        else:
            _remove(path, record)


def _adopt(kept: KeptServers, record: _Record, *, token: str, interface: str) -> Adopted | None:
    wanted = {"run_id": kept.run_id, "fingerprint": kept.fingerprint, "interface": interface}
    try:
        connection = _ask(record, {"op": "adopt", "new_token": token, "seconds": kept.seconds, **wanted})
    except (ControlError, OSError) as error:
        _print(record, f"cannot be taken over and is ended: {error}")
        return None
    return Adopted(
        process_id=record.process_id,
        socket_path=Path(record.socket_path),
        address=record.address,
        connection=connection,
    )


def _ask(record: _Record, message: Message, seconds: float = _ANSWER_SECONDS) -> socket.socket:
    """Send ``message`` with the record's token to the recorded server. Return the connection when the server agrees.

    Raises:
        ControlError: the server refused the request.
        OSError: the server did not answer.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(record.socket_path)
        send(connection, {**message, "token": record.token})
        answers, _ = FrameReader(connection).pump()
        if not answers or answers[0].get("op") == "error":
            reason = answers[0].get("reason") if answers else "it closed the connection"
            raise ControlError(f"it refused: {reason}")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _request_end(record: _Record, reason: str, *, seconds: float) -> None:
    _ask(record, {"op": "end", "reason": reason}, seconds).close()


def _wait_or_kill(path: Path, record: _Record, *, seconds: float) -> None:
    # Wait until a server that was asked to end has ended. Kill it if it does not end in time.
    try:
        descriptor = os.pidfd_open(record.process_id)
    except ProcessLookupError:
        _remove(path, record)
        return
    try:
        # From now on, the descriptor refers to this process, also if another process gets its process id.
        is_it = _start_ticks(record.process_id) == record.start_ticks
        if is_it and not select.select([descriptor], [], [], seconds)[0]:
            _print(record, f"did not end within {seconds:g} s and was killed")
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            # Until the process has ended, it keeps its memory, and its lock prevents the removal of its folder.
            select.select([descriptor], [], [], _END_SECONDS)
    finally:
        os.close(descriptor)
    _remove(path, record)


def _remove(path: Path, record: _Record) -> None:
    for each in (path, Path(record.socket_path)):
        each.unlink(missing_ok=True)
    # A killed server could not remove its folder.
    Use(path.parent).end()


def _start_ticks(process_id: int) -> int | None:
    try:
        about = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in parentheses can contain spaces and parentheses.
    fields = about.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[_START_TIME_FIELD])


def _print(record: _Record, text: str) -> None:
    print(f"node {record.node}: snapshot server (process {record.process_id}) {text}", file=sys.stderr, flush=True)

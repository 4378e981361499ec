"""A node's sidecars: processes that run beside the ranks, live as long as the node, and outlive restarts of the ranks.

The agent starts ``python -m MODULE`` with one line of JSON on standard input: ``socket_path`` (Unix socket for the
node's ranks), ``interface`` (address to bind to for other nodes), ``token`` and ``node``. The sidecar answers with one
line ``{"address": "host:port"}`` on standard output and ends when its standard input closes. Its standard error is kept
in ``logs/node-000-NAME.log``. The agent can also take over the snapshot server of an earlier job of the run (``kept``).
"""

import contextlib
import functools
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.control.membership.machine import describe_returncode
from megatron_ft.control.messages import SidecarAddress
from megatron_ft.control.node import kept as kept_servers
from megatron_ft.control.node.fork_server import die_with_parent
from megatron_ft.control.node.kept import Adopted, KeptServers
from megatron_ft.control.node.ranks import last_line
from megatron_ft.control.runtime_dir import Use, socket_path
from megatron_ft.errors import ControlError
from megatron_ft.framing import decode, send

START_SECONDS = 60.0
"""Longest wait for the address of a sidecar."""
STOP_SECONDS = 10.0
"""Time that sidecars have to end before they are killed."""
_MAX_LINE_BYTES = 4096
_READ_BYTES = 4096


@dataclass
class _Sidecar:
    """A sidecar of a node: a process beside the node's ranks."""

    name: str
    process: "subprocess.Popen[bytes] | None"
    """Process of the sidecar; None for a snapshot server of an earlier job, which is not a child of this process."""
    pidfd: int
    socket_path: Path
    log: Path
    log_begin_bytes: int
    """Size in bytes of the log when this sidecar started. Earlier sidecars of the node wrote this part of the log."""
    address: str | None = None
    adopted: Adopted | None = None
    outlives: bool = False
    """Whether the sidecar may outlive this agent."""
    is_recorded: bool = False
    line: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Read from the sidecar's output, whose first line must be its address. Return False at the end of the output.

        Raises:
            ControlError: the first line contains no address.
        """
        assert self.process is not None and self.process.stdout is not None, "the sidecar has no pipe to this process"
        data = os.read(self.process.stdout.fileno(), _READ_BYTES)
        # Later output is read and dropped, because a full pipe would block the sidecar.
        if self.address is not None:
            return bool(data)
        self.line += data
        head, end, _ = self.line.partition(b"\n")
        if len(head) > _MAX_LINE_BYTES:
            raise ControlError(f"sidecar {self.name}: its first line of output exceeds {_MAX_LINE_BYTES} bytes")
        if end:
            self.address = self._address_in(bytes(head))
        return bool(data)

    def _address_in(self, line: bytes) -> str:
        address = decode(line).get("address")
        if not isinstance(address, str) or not address:
            raise ControlError(f"sidecar {self.name}: must print its address in the first line, but printed {line!r}")
        return address

    def request_end(self) -> None:
        """Ask the sidecar to end. Call this only for a sidecar that may outlive the agent's process."""
        if self.adopted is not None:
            send(self.adopted.connection, {"op": "end", "reason": "the job has finished"})
        else:
            assert self.process is not None and self.process.stdin is not None, "the sidecar has no pipe"
            self.process.stdin.write(b"end\n")

    def hang_up(self) -> None:
        """Close the connection to the sidecar. The sidecar then knows that the agent's process has ended."""
        if self.adopted is not None:
            self.adopted.connection.close()
        else:
            assert self.process is not None and self.process.stdin is not None, "the sidecar has no pipe"
            self.process.stdin.close()

    def how_it_ended(self) -> str:
        """Wait until the sidecar's process has ended. Return a text with its exit and the last line of its log."""
        returncode = None if self.process is None else self.process.wait()
        how = "exited with code 0" if returncode == 0 else "ended" if returncode is None else ""
        how = how or describe_returncode(int(returncode or 0))
        last = last_line(self.log, self.log_begin_bytes)
        cause = f", the last line of its log: {last}" if last else ""
        return f"sidecar {self.name} {how} while the job ran{cause}; its log: {self.log}"


class Sidecars:
    """All sidecars of a node, started together; used by the node's main thread only."""

    def __init__(
        self,
        modules: Mapping[str, str],
        *,
        node: int,
        runtime_dir: Path,
        log_dir: Path,
        interface: str,
        token: str,
        kept: KeptServers | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """Start the sidecars. The call forks the process, so the process must not have other threads yet.

        Args:
            modules: maps the name of each sidecar to its Python module.
            kept: settings of snapshot servers that outlive their agent, see ``AgentSpec.kept_servers``.
            start_seconds: longest wait for the sidecars' addresses.
        """
        self._token, self._node, self._kept = token, node, kept
        self._start_seconds = start_seconds
        self._deadline = time.monotonic() + start_seconds
        self._all: list[_Sidecar] = []
        for name, module in modules.items():
            path = socket_path(runtime_dir, node, name)
            about = {"socket_path": str(path), "interface": interface, "token": token, "node": node}
            log = log_dir / f"node-{node:03d}-{name}.log"
            of_servers = kept if name == kept_servers.NAME else None
            adopted = None
            if of_servers is not None:
                adopted = kept_servers.take_over(of_servers, node, token=token, interface=interface)
            if adopted is not None:
                self._all.append(_of_earlier_job(name, adopted, log))
            else:
                self._all.append(_start(name, module, path, log, about, of_servers))

    @property
    def ready(self) -> bool:
        """Whether all sidecars have sent their addresses."""
        return all(service.address is not None for service in self._all)

    def seconds_left(self) -> float | None:
        """Return the seconds left for the sidecars to send their addresses; None when all have sent them."""
        return None if self.ready else max(0.0, self._deadline - time.monotonic())

    def check_in_time(self) -> None:
        """Check that every sidecar has sent its address, or still has time to send it.

        Raises:
            ControlError: the time has passed, and a sidecar has not sent its address.
        """
        if self.seconds_left() == 0.0:
            silent = ", ".join(f"{service.name} (log: {service.log})" for service in self._all if not service.address)
            raise ControlError(f"sidecars did not report their addresses within {self._start_seconds:g} s: {silent}")

    def watch(self, selector: selectors.BaseSelector, on_ready: Callable[[], None]) -> None:
        """Register callbacks in ``selector`` for the output and the end of each sidecar. ``on_ready`` is called once,
        when all sidecars have sent their addresses.

        The callbacks raise ControlError for a sidecar that sends no address or ends.
        """
        for service in self._all:
            if service.process is not None:
                read = functools.partial(self._read, service, selector, on_ready)
                selector.register(service.process.stdout, selectors.EVENT_READ, read)  # type: ignore[arg-type]
            selector.register(service.pidfd, selectors.EVENT_READ, functools.partial(_ended, service))
        if self.ready:
            on_ready()

    def _read(self, service: _Sidecar, selector: selectors.BaseSelector, on_ready: Callable[[], None]) -> None:
        was_ready = self.ready
        if not service.read():
            selector.unregister(service.process.stdout)  # type: ignore[arg-type,union-attr]
        if service.outlives and service.address is not None and not service.is_recorded:
            service.is_recorded = True
            assert self._kept is not None and service.process is not None, "started to outlive this process"
            kept_servers.write_record(
                self._kept,
                self._node,
                process_id=service.process.pid,
                socket_path=service.socket_path,
                address=service.address,
                token=self._token,
            )
        if self.ready and not was_ready:
            on_ready()

    def addresses(self) -> dict[str, SidecarAddress]:
        """Return the address of each sidecar by name. Call this after all sidecars are ready."""
        return {one.name: SidecarAddress(address=str(one.address), socket=str(one.socket_path)) for one in self._all}

    def for_ranks(self, addresses: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, object]]:
        """Return the sidecars in the form that this node's ranks receive, see ``RankContext.sidecars``.

        Args:
            addresses: maps sidecar name and node number (as text) to an address.
        """
        return {
            service.name: {
                "socket": str(service.socket_path),
                "token": self._token,
                "addresses": dict(addresses[service.name]),
                "first_generation": 0 if self._kept is None else self._kept.first_generation,
            }
            for service in self._all
        }

    def close(self, *, has_finished: bool = True) -> None:
        """Ask all sidecars to end and wait for them. Kill those that do not end in time.

        Args:
            has_finished: whether the run's windows (snapshots) are no longer needed. If false, sidecars that may
                outlive this process are not ended.
        """
        # All sidecars are asked before the first wait, so that they end at the same time.
        for service in self._all:
            with contextlib.suppress(OSError):
                if has_finished and service.outlives:
                    service.request_end()
                service.hang_up()
        deadline = time.monotonic() + STOP_SECONDS
        for service in self._all:
            if has_finished or not service.outlives:
                _wait_or_kill(service, deadline)


def _start(
    name: str, module: str, socket_path: Path, log: Path, about: dict[str, object], kept: KeptServers | None
) -> _Sidecar:
    outlives = kept is not None and kept.seconds > 0
    lock: int | None = None
    if kept is not None and outlives:
        # The server inherits a lock of its own (another open file), because this process releases its lock at its end.
        lock = Use(socket_path.parent).descriptor
        about = {**about, "outlive": _outlive(kept, socket_path, about), "lock_descriptor": lock}
    with log.open("ab") as errors:
        log_begin_bytes = errors.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            # The kernel kills the sidecar when the thread that forks it ends (prctl(2)): here the agent's main thread.
            preexec_fn=None if outlives else functools.partial(die_with_parent, os.getpid()),
            # Signals of the launcher and of a terminal end the agent's session, so the server needs another session.
            start_new_session=outlives,
            pass_fds=() if lock is None else (lock,),
        )
    if lock is not None:
        os.close(lock)
    service = _Sidecar(name, process, os.pidfd_open(process.pid), socket_path, log, log_begin_bytes, outlives=outlives)
    with contextlib.suppress(BrokenPipeError):  # the sidecar has ended, which the selector reports
        process.stdin.write(json.dumps(about).encode() + b"\n")  # type: ignore[union-attr]
    return service


def _outlive(kept: KeptServers, socket_path: Path, about: dict[str, object]) -> dict[str, object]:
    return {
        "seconds": kept.seconds,
        "run_id": kept.run_id,
        "fingerprint": kept.fingerprint,
        "interface": about["interface"],
        "record_path": str(kept_servers.record_path(socket_path)),
    }


def _of_earlier_job(name: str, adopted: Adopted, log: Path) -> _Sidecar:
    log_begin_bytes = log.stat().st_size if log.exists() else 0
    return _Sidecar(
        name,
        None,
        os.pidfd_open(adopted.process_id),
        adopted.socket_path,
        log,
        log_begin_bytes,
        address=adopted.address,
        adopted=adopted,
        outlives=True,
    )


def _ended(service: _Sidecar) -> None:
    raise ControlError(service.how_it_ended())


def _wait_or_kill(service: _Sidecar, deadline: float) -> None:
    if not select.select([service.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        print(
            f"sidecar {service.name} did not end within {STOP_SECONDS:g} s and was killed", file=sys.stderr, flush=True
        )
        signal.pidfd_send_signal(service.pidfd, signal.SIGKILL)
        select.select([service.pidfd], [], [], STOP_SECONDS)
    if service.process is not None:
        service.process.wait()
        service.process.stdout.close()  # type: ignore[union-attr]
    os.close(service.pidfd)
    service.socket_path.unlink(missing_ok=True)


def by_name(of_nodes: Mapping[int, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Regroup sidecar addresses. Keys of the input: node, then name. Keys of the result: name, then node (as text)."""
    found: dict[str, dict[str, str]] = {}
    for node, addresses in sorted(of_nodes.items()):
        for name, address in addresses.items():
            found.setdefault(name, {})[str(node)] = address
    return found

"""A node's sidecars: processes beside the ranks that live as long as the node and outlive restarts of the ranks.

The agent starts ``python -m MODULE`` with one line of JSON on standard input: ``socket_path`` (Unix socket for the
node's ranks), ``interface`` (address to bind to for other nodes), ``token`` and ``node``. The sidecar answers with one
line ``{"address": "host:port"}`` on standard output and ends when its standard input closes. Its standard error is kept
in ``logs/node-000-NAME.log``.
"""

import contextlib
import functools
import json
import os
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
from megatron_ft.control.node.fork_server import die_with_parent
from megatron_ft.control.node.ranks import last_line
from megatron_ft.control.runtime_dir import socket_path
from megatron_ft.errors import ControlError
from megatron_ft.framing import decode

START_SECONDS = 60.0
"""Longest wait for the address of a sidecar."""
STOP_SECONDS = 10.0
"""Time that sidecars have to end before they are killed."""
_MAX_LINE_BYTES = 4096
_READ_BYTES = 4096


@dataclass
class _Sidecar:
    """A sidecar of a node."""

    name: str
    process: "subprocess.Popen[bytes]"
    pidfd: int
    socket_path: Path
    log: Path
    log_begin_bytes: int
    """Size of the log in bytes when this sidecar started; earlier sidecars of the node wrote this part of the log."""
    address: str | None = None
    line: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Read from the sidecar's output, whose first line is its address. Return whether more output may follow.

        Raises:
            ControlError: the first line contains no address.
        """
        assert self.process.stdout is not None, "the sidecar's standard output is not a pipe"
        data = os.read(self.process.stdout.fileno(), _READ_BYTES)
        # Later output is read and dropped, because a full pipe would block the sidecar.
        if self.address is not None:
            return bool(data)
        self.line += data
        head, end, _ = self.line.partition(b"\n")
        if len(head) > _MAX_LINE_BYTES:
            raise ControlError(f"sidecar {self.name}: its first line is longer than {_MAX_LINE_BYTES} bytes")
        if end:
            self.address = self._address_in(bytes(head))
        return bool(data)

    def _address_in(self, line: bytes) -> str:
        address = decode(line).get("address")
        if not isinstance(address, str) or not address:
            raise ControlError(f"sidecar {self.name}: its first line must contain its address, but is {line!r}")
        return address

    def how_it_ended(self) -> str:
        """Wait for the end of the sidecar's process, and describe it."""
        returncode = self.process.wait()
        how = "exited with code 0" if returncode == 0 else describe_returncode(returncode)
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
        start_seconds: float = START_SECONDS,
    ) -> None:
        """Start the sidecars. Call this before the process has other threads, because it forks.

        Args:
            modules: maps the name of each sidecar to its Python module.
            start_seconds: longest wait for the sidecars' addresses.
        """
        self._token = token
        self._start_seconds = start_seconds
        self._deadline = time.monotonic() + start_seconds
        self._all: list[_Sidecar] = []
        for name, module in modules.items():
            path = socket_path(runtime_dir, node, name)
            about = {"socket_path": str(path), "interface": interface, "token": token, "node": node}
            log = log_dir / f"node-{node:03d}-{name}.log"
            self._all.append(_start(name, module, path, log, json.dumps(about).encode() + b"\n"))

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
            read = functools.partial(self._read, service, selector, on_ready)
            selector.register(service.process.stdout, selectors.EVENT_READ, read)  # type: ignore[arg-type]
            selector.register(service.pidfd, selectors.EVENT_READ, functools.partial(_ended, service))
        if not self._all:
            on_ready()

    def _read(self, service: _Sidecar, selector: selectors.BaseSelector, on_ready: Callable[[], None]) -> None:
        was_ready = self.ready
        if not service.read():
            selector.unregister(service.process.stdout)  # type: ignore[arg-type]
        if self.ready and not was_ready:
            on_ready()

    def addresses(self) -> dict[str, SidecarAddress]:
        """Return the address of each sidecar by name, after all are ready."""
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
            }
            for service in self._all
        }

    def close(self) -> None:
        """Ask all sidecars to end and wait for them; kill those that do not end in time."""
        # All sidecars are asked before the first wait, so that they end at the same time.
        for service in self._all:
            with contextlib.suppress(BrokenPipeError):
                service.process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + STOP_SECONDS
        for service in self._all:
            _wait_or_kill(service, deadline)


def _start(name: str, module: str, socket_path: Path, log: Path, line: bytes) -> _Sidecar:
    with log.open("ab") as errors:
        log_begin_bytes = errors.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            # The kernel watches the thread that forks, not its process (prctl(2)): here the agent's main thread.
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    service = _Sidecar(name, process, os.pidfd_open(process.pid), socket_path, log, log_begin_bytes)
    with contextlib.suppress(BrokenPipeError):  # the sidecar has ended, which the selector reports
        process.stdin.write(line)  # type: ignore[union-attr]
    return service


def _ended(service: _Sidecar) -> None:
    raise ControlError(service.how_it_ended())


def _wait_or_kill(service: _Sidecar, deadline: float) -> None:
    try:
        service.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(
            f"sidecar {service.name} did not end within {STOP_SECONDS:g} s and was killed", file=sys.stderr, flush=True
        )
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
    service.process.stdout.close()  # type: ignore[union-attr]
    os.close(service.pidfd)
    service.socket_path.unlink(missing_ok=True)


def by_name(of_nodes: Mapping[int, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Convert addresses by node and sidecar name into addresses by sidecar name and node (as text)."""
    found: dict[str, dict[str, str]] = {}
    for node, addresses in sorted(of_nodes.items()):
        for name, address in addresses.items():
            found.setdefault(name, {})[str(node)] = address
    return found

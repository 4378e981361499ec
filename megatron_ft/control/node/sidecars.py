"""A node's sidecars: processes beside the ranks that live as long as the node and outlive restarts of the ranks.

The agent starts ``python -m MODULE`` with one line of JSON on standard input: ``socket_path`` (unix socket for the
node's ranks), ``interface`` (address to bind to for other nodes), ``token`` and ``node``. The service answers with one
line ``{"address": "host:port"}`` on standard output and ends when its standard input closes. What it writes to
standard error is kept in ``logs/node-000-NAME.log``.
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
"""Longest wait for a service's address."""
STOP_SECONDS = 10.0
"""A service that lives so long after it was asked to end is killed."""
_MAX_LINE_BYTES = 4096
_READ_BYTES = 4096


@dataclass
class Sidecar:
    """One service of a node."""

    name: str
    process: "subprocess.Popen[bytes]"
    pidfd: int
    socket_path: Path
    log: Path
    log_begin_bytes: int
    """Size of the log when it was started: earlier sidecars of the node have written that."""
    address: str | None = None
    line: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Take in what it wrote, whose first line is its address; whether more may come.

        Raises:
            ControlError: the line is no address.
        """
        assert self.process.stdout is not None, "a service's standard output is a pipe"
        data = os.read(self.process.stdout.fileno(), _READ_BYTES)
        # Read and dropped: a full pipe would block the service.
        if self.address is not None:
            return bool(data)
        self.line += data
        head, end, _ = self.line.partition(b"\n")
        if len(head) > _MAX_LINE_BYTES:
            raise ControlError(f"sidecar {self.name}: its first line must have at most {_MAX_LINE_BYTES} bytes")
        if end:
            self.address = self._address_in(bytes(head))
        return bool(data)

    def _address_in(self, line: bytes) -> str:
        address = decode(line).get("address")
        if not isinstance(address, str) or not address:
            raise ControlError(f"sidecar {self.name}: its first line must hold its address; it holds {line!r}")
        return address

    def how_it_ended(self) -> str:
        """Description of its end, after its process has ended."""
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
        """Start them: fork before this process has threads.

        Args:
            modules: name to module.
            start_seconds: longest wait for their addresses.
        """
        self._token = token
        self._start_seconds = start_seconds
        self._deadline = time.monotonic() + start_seconds
        self._all: list[Sidecar] = []
        for name, module in modules.items():
            path = socket_path(runtime_dir, node, name)
            about = {"socket_path": str(path), "interface": interface, "token": token, "node": node}
            log = log_dir / f"node-{node:03d}-{name}.log"
            self._all.append(_start(name, module, path, log, json.dumps(about).encode() + b"\n"))

    @property
    def ready(self) -> bool:
        """Whether all have sent their address."""
        return all(service.address is not None for service in self._all)

    def seconds_left(self) -> float | None:
        """Time left to send an address; None when all have."""
        return None if self.ready else max(0.0, self._deadline - time.monotonic())

    def check_in_time(self) -> None:
        """Refuse to wait any longer.

        Raises:
            ControlError: an address is overdue.
        """
        if self.seconds_left() == 0.0:
            silent = ", ".join(f"{service.name} (log: {service.log})" for service in self._all if not service.address)
            raise ControlError(f"no address of sidecar {silent} within {self._start_seconds:g} s")

    def watch(self, selector: selectors.BaseSelector, on_ready: Callable[[], None]) -> None:
        """Have ``selector`` call back when one writes or ends; ``on_ready`` is called once, when all are ready.

        The callbacks raise ControlError for a sidecar that sends no address or ends.
        """
        for service in self._all:
            read = functools.partial(self._read, service, selector, on_ready)
            selector.register(service.process.stdout, selectors.EVENT_READ, read)  # type: ignore[arg-type]
            selector.register(service.pidfd, selectors.EVENT_READ, functools.partial(_ended, service))
        if not self._all:
            on_ready()

    def _read(self, service: Sidecar, selector: selectors.BaseSelector, on_ready: Callable[[], None]) -> None:
        was_ready = self.ready
        if not service.read():
            selector.unregister(service.process.stdout)  # type: ignore[arg-type]
        if self.ready and not was_ready:
            on_ready()

    def addresses(self) -> dict[str, SidecarAddress]:
        """Name to where it listens; all are ready."""
        return {one.name: SidecarAddress(address=str(one.address), socket=str(one.socket_path)) for one in self._all}

    def for_ranks(self, addresses: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, object]]:
        """Sidecars as this node's ranks receive them, see ``RankContext.sidecars``.

        Args:
            addresses: service name to node number (as text) to address.
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
        """Ask all to end and wait for it; one that does not is killed."""
        # All are asked first, so that they share the time.
        for service in self._all:
            with contextlib.suppress(BrokenPipeError):
                service.process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + STOP_SECONDS
        for service in self._all:
            _wait_or_kill(service, deadline)


def _start(name: str, module: str, socket_path: Path, log: Path, line: bytes) -> Sidecar:
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
    service = Sidecar(name, process, os.pidfd_open(process.pid), socket_path, log, log_begin_bytes)
    with contextlib.suppress(BrokenPipeError):  # it has ended, which the selector reports
        process.stdin.write(line)  # type: ignore[union-attr]
    return service


def _ended(service: Sidecar) -> None:
    raise ControlError(service.how_it_ended())


def _wait_or_kill(service: Sidecar, deadline: float) -> None:
    try:
        service.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"sidecar {service.name} did not end within {STOP_SECONDS:g} s: killed", file=sys.stderr, flush=True)
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
    service.process.stdout.close()  # type: ignore[union-attr]
    os.close(service.pidfd)
    service.socket_path.unlink(missing_ok=True)


def by_name(of_nodes: Mapping[int, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Collect for each service the address of every node that has it, from the services of each node; nodes as JSON
    keys."""
    found: dict[str, dict[str, str]] = {}
    for node, addresses in sorted(of_nodes.items()):
        for name, address in addresses.items():
            found.setdefault(name, {})[str(node)] = address
    return found

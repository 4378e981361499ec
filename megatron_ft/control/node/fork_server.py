"""Starts ranks by forking a process that has already imported the modules that ranks need.

``python -m megatron_ft.control.node.fork_server --socket PATH --preload MODULE ...`` imports the modules once and then
serves its Unix socket. A client (a node's agent) sends ``spawn`` with the rank's log file as a descriptor. The client
receives the rank's process id, and later the rank's exit code. When a client's connection closes, the ranks that were
started over this connection are killed. When the server's standard input closes, the server and all ranks end.

A fork is safe, because the server has one thread, no gRPC and no OpenMP region. The server must not initialise CUDA.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.control.runtime_dir import Use
from megatron_ft.errors import ControlError, SoftwareError
from megatron_ft.framing import FrameReader, Message, send

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

MAX_CLIENTS = 512
"""Largest number of open connections of clients to the fork server, which closes further connections at once."""

HELD_SIGNALS = (signal.SIGTERM,)
"""Signals that a new rank blocks until its handlers are installed. A stop request that arrives earlier therefore waits
and does not kill the rank."""

UNSTARTED_EXIT_CODE = 1
"""Exit code that is reported for a rank that could not be forked."""

SINGLE_THREAD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
"""Environment that prevents libraries from starting threads when the server imports them."""


@dataclass
class _Client:
    reader: FrameReader
    children: dict[int, "_Child"] = field(default_factory=dict)


@dataclass(frozen=True)
class _Child:
    rank: int
    process_id: int
    pidfd: int
    client: _Client


class _ForkServer:
    """The fork server, which has a single thread."""

    def __init__(
        self,
        listener: socket.socket,
        run: Callable[[Message], int],
        watch_stdin: bool,
        *,
        own_descriptors: Sequence[int] = (),
    ) -> None:
        """Register the sockets to watch; ``serve`` runs the server.

        Args:
            run: called with a rank's spec in each forked child; returns the child's exit code.
            own_descriptors: further descriptors of the server, which forked children close.
        """
        self._run = run
        self._own_descriptors = tuple(own_descriptors)
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._clients: list[_Client] = []
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        if watch_stdin:
            self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._parent_closed)
        self._serving = True

    def serve(self) -> None:
        """Serve until standard input closes; then kill all ranks."""
        try:
            while self._serving:
                for key, _ in self._selector.select():
                    key.data()
        finally:
            for client in list(self._clients):
                self._drop(client)

    def _parent_closed(self) -> None:
        if not os.read(sys.stdin.fileno(), 1):
            self._serving = False

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if len(self._clients) >= MAX_CLIENTS:
            connection.close()
            return
        client = _Client(FrameReader(connection))
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(client))

    def _read(self, client: _Client) -> None:
        # The client may have been dropped since ``select`` returned this event.
        if client not in self._clients:
            return
        try:
            messages, closed = client.reader.pump()
            for message in messages:
                self._obey(client, message)
        # One bad client must not end the server, because the end of the server kills the ranks of all clients.
        except (ControlError, OSError, KeyError, TypeError, ValueError) as error:
            print(f"fork server: dropping the connection of a client: {error!r}", file=sys.stderr, flush=True)
            closed = True
        if closed:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        for child in list(client.children.values()):
            # All are killed before the first is waited for, so that they end at the same time.
            self._kill_group(child)
        for child in list(client.children.values()):
            self._reap(child, notify=False)
        self._selector.unregister(client.reader.sock)
        client.reader.close()
        self._clients.remove(client)

    def _obey(self, client: _Client, message: Message) -> None:
        match message["op"]:
            case "spawn":
                self._spawn(client, message)
            case "signal":
                self._signal(client, message["rank"], message["signal"])
            case other:
                raise ControlError(f"unknown request {other!r}")

    def _signal(self, client: _Client, rank: int, number: int) -> None:
        """Send a signal to a rank. SIGKILL goes to the rank's whole process group. Do nothing if the rank has ended."""
        for child in list(client.children.values()):
            if child.rank == rank and number == signal.SIGKILL:
                self._kill_group(child)
            elif child.rank == rank:
                # Safe if the rank has just ended: until it is reaped, no other process gets its process id.
                os.kill(child.process_id, number)

    def _spawn(self, client: _Client, message: Message) -> None:
        if not client.reader.descriptors:
            raise ControlError("the spawn message has no file descriptor for the log")
        rank = int(message["rank"])
        log = client.reader.descriptors.popleft()
        try:
            process_id, pidfd = self._fork(message, log)
        except OSError as error:  # too many processes or descriptors, or no memory
            with contextlib.suppress(OSError):  # the disk is full
                os.write(log, f"rank {rank} could not be started: {error}\n".encode())
            # Only this rank has failed. An error raised here would drop the client, and so kill all ranks of its node.
            self._report_exit(client, rank, UNSTARTED_EXIT_CODE, time.time())
            return
        finally:
            os.close(log)
        child = _Child(rank, process_id, pidfd, client)
        client.children[process_id] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._reap(child, notify=True))
        send(client.reader.sock, {"op": "spawned", "rank": child.rank, "process_id": process_id})

    def _fork(self, message: Message, log: int) -> tuple[int, int]:
        """Fork a rank. Return its process id, and a descriptor that becomes readable when the process has ended."""
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        try:
            process_id = os.fork()
            if process_id == 0:
                self._become_rank(message, log, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
        try:
            return process_id, os.pidfd_open(process_id)
        except OSError:
            # Without a descriptor the end of the rank would not be noticed.
            os.kill(process_id, signal.SIGKILL)
            os.waitpid(process_id, 0)
            raise

    def _become_rank(self, message: Message, log: int, parent: int) -> None:
        code = 1
        try:
            # A process group of its own, so that everything the rank starts is killed with it.
            os.setsid()
            die_with_parent(parent)
            self._leave_server(log)
            code = self._run(message["spec"])
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _leave_server(self, log: int) -> None:
        for key in list(self._selector.get_map().values()):
            # A rank that kept a client's connection open would hide the end of this server from that client.
            if key.fd > 2:
                os.close(key.fd)
        # A copy of the lock file's descriptor would keep the runtime folder in use.
        for descriptor in self._own_descriptors:
            os.close(descriptor)
        self._selector.close()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)

    def _kill_group(self, child: _Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process_id, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            # A child that was just forked may not be the leader of its group yet.
            os.kill(child.process_id, signal.SIGKILL)

    def _reap(self, child: _Child, *, notify: bool) -> None:
        if child.process_id not in child.client.children:
            return
        at_seconds = time.time()
        if notify:
            # This precedes ``waitpid``: until the rank is reaped, its process id still names its process group.
            self._kill_group(child)
        _, status = os.waitpid(child.process_id, 0)
        del child.client.children[child.process_id]
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        if notify:
            self._report_exit(child.client, child.rank, os.waitstatus_to_exitcode(status), at_seconds)

    def _report_exit(self, client: _Client, rank: int, returncode: int, at_seconds: float) -> None:
        message = {"op": "exited", "rank": rank, "returncode": returncode, "at_seconds": at_seconds}
        with contextlib.suppress(ConnectionError):  # the client is gone: the next read drops it
            send(client.reader.sock, message)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, the process with the id ``parent``, ends."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # If the parent died before the call, the kernel sends no signal.
    if os.getppid() != parent:
        os._exit(1)


def preload(modules: Sequence[str]) -> float:
    """Import ``modules``; for an entry ``module:function``, also call the function. Return the duration in seconds.

    Raises:
        SoftwareError: an import started threads, which would be lost in a fork.
    """
    begin = time.monotonic()
    for entry in modules:
        module, _, function = entry.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(names) > 1:
        raise SoftwareError(f"cannot fork ranks: importing {', '.join(modules)} left several threads running: {names}")
    gc.collect()
    # Unfrozen objects would be written to by the garbage collectors of ranks, and shared pages would be copied.
    gc.freeze()
    return time.monotonic() - begin


def listen(path: Path) -> socket.socket:
    """Open a listening Unix socket at ``path`` that only this user can use."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # ``bind`` creates the file. If its mode were changed afterwards, other users could connect in between.
    previous = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(previous)
    listener.listen(128)
    return listener


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the server's process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--socket", type=Path, required=True, help="Unix socket to serve; the permissions of its directory protect it"
    )
    parser.add_argument(
        "--preload", nargs="*", default=[], help="modules to import, or module:function to call, before the first fork"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use = Use(options.socket.parent)
    listener = listen(options.socket)
    try:
        seconds = preload(options.preload)
        print(json.dumps({"ready": True, "import_seconds": round(seconds, 3)}), flush=True)
        run = importlib.import_module("megatron_ft.control.node.rank_process").run
        own = () if use.descriptor is None else (use.descriptor,)
        _ForkServer(listener, run, watch_stdin=True, own_descriptors=own).serve()
    finally:
        listener.close()
        options.socket.unlink(missing_ok=True)
        use.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

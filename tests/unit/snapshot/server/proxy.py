"""Provides a TCP proxy in front of a server, in which a test can change, delay or stop bytes."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron_ft.snapshot.server.wire import host_and_port

Disturb = Callable[[int, bytes], bytes | None]
"""Function from (number of earlier bytes of all connections, these bytes) to the bytes that are forwarded. None breaks
the connection."""


@dataclass
class Proxy:
    """Listens at the address that peers use for the server."""

    address: str
    target: str
    disturb: Disturb
    num_passed: int = 0
    num_connections: int = 0
    open: list[socket.socket] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        """Accept and forward connections in a thread until the listener closes."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self.num_connections += 1
                server = socket.create_connection(host_and_port(self.target))
                self.open += [client, server]
                threading.Thread(target=self._join, args=(client, server), daemon=True).start()

    def _join(self, client: socket.socket, server: socket.socket) -> None:
        """Forward bytes in both directions until one side ends, then close both. Later bytes are answered with a
        reset."""
        back = threading.Thread(target=self._pump, args=(server, client, lambda data: data), daemon=True)
        back.start()
        self._pump(client, server, self._disturbed)
        back.join()
        client.close()
        server.close()

    def _disturbed(self, data: bytes) -> bytes | None:
        passed = self.disturb(self.num_passed, data)
        self.num_passed += len(data)
        return passed

    def _pump(self, source: socket.socket, sink: socket.socket, disturb: Callable[[bytes], bytes | None]) -> None:
        """Forward bytes until the source ends. If the sink has closed, bytes in the other direction may still
        arrive."""
        ended = [sink]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed = disturb(data)
                if passed is None:
                    ended.append(source)
                    break
                try:
                    sink.sendall(passed)
                except OSError:
                    return
        for sock in ended:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(target: str, disturb: Disturb, *, accept_after_seconds: float = 0.0) -> Iterator[Proxy]:
    """Run a proxy in front of ``target`` during the block. It accepts connections after ``accept_after_seconds``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = Proxy(f"127.0.0.1:{listener.getsockname()[1]}", target, disturb)
        thread = threading.Timer(accept_after_seconds, running.serve, args=(listener,))
        thread.daemon = True
        thread.start()
        try:
            yield running
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for sock in running.open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

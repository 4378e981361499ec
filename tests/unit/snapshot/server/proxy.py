"""A TCP connection that a test can disturb: bytes towards a keeper pass through a function."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron_ft.snapshot.server.wire import host_and_port

Disturb = Callable[[int, bytes], bytes | None]
"""From (bytes of all connections before these, these) to what passes; None breaks the connection."""


@dataclass
class Proxy:
    """Listens where a keeper is said to be."""

    address: str
    target: str
    disturb: Disturb
    num_passed: int = 0
    num_connections: int = 0
    open: list[socket.socket] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        """Thread: pass connections on until the listener closes."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self.num_connections += 1
                server = socket.create_connection(host_and_port(self.target))
                self.open += [client, server]
                threading.Thread(target=self._join, args=(client, server), daemon=True).start()

    def _join(self, client: socket.socket, server: socket.socket) -> None:
        """Pass bytes both ways until one side ends, then close both: what still arrives is answered by a reset."""
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
        """Until the source ends. Where the sink has gone the way back may still have its last words."""
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
def proxy(target: str, disturb: Disturb) -> Iterator[Proxy]:
    """A proxy before ``target`` for the time of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = Proxy(f"127.0.0.1:{listener.getsockname()[1]}", target, disturb)
        thread = threading.Thread(target=running.serve, args=(listener,), daemon=True)
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

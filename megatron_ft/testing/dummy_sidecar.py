"""Sidecar (helper process beside a node's ranks) for tests. It answers ranks with its process id over a unix socket.

The environment variable ``DUMMY_SERVICE`` makes the sidecar misbehave. ``mute``: it prints no address. A key of
``FIRST_LINES``: it prints that line in place of its address. ``fails``: it ends before it prints its address.
``fails_if_full``: as ``fails``, but only if a file ``full`` is beside its log. ``brittle``: it kills itself when the
first rank connects. ``stubborn``: it does not end when its standard input closes.
"""

import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path

from megatron_ft.control.node.fork_server import listen
from megatron_ft.framing import FrameReader, send

FIRST_LINES = {"garbage": "[1]", "homeless": "{}", "wordy": 5000 * "x"}
MANNER = os.environ.get("DUMMY_SERVICE", "")


def main() -> int:
    """Print the address of this sidecar, and answer ranks until standard input closes. Return the exit code."""
    about = json.loads(sys.stdin.readline())
    if MANNER == "fails" or (
        MANNER == "fails_if_full" and Path(os.readlink("/proc/self/fd/2")).with_name("full").exists()
    ):
        print("dummy service: no memory", file=sys.stderr, flush=True)
        return 3
    listener = listen(about["socket_path"])
    with socket.create_server((about["interface"], 0)) as for_peers:
        host, port = for_peers.getsockname()[:2]
        if MANNER != "mute":
            print(FIRST_LINES.get(MANNER, json.dumps({"address": f"{host}:{port}"})), flush=True)
        print(f"serving node {about['node']}", file=sys.stderr, flush=True)
        serve(listener, about["token"])
    while MANNER == "stubborn":
        signal.pause()
    return 0


def serve(listener: socket.socket, token: str) -> None:
    """Answer one message on each connection to ``listener``, until standard input closes."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return
            connection, _ = listener.accept()
            (request,), _ = FrameReader(connection).pump()
            if MANNER == "brittle":
                os.kill(os.getpid(), signal.SIGKILL)
            send(connection, {"process_id": os.getpid(), "trusted": request["token"] == token})
            connection.close()


if __name__ == "__main__":
    sys.exit(main())

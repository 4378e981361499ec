"""A sidecar of a node for tests: sends its process id to ranks over its unix socket.

``DUMMY_SERVICE`` in the environment makes it misbehave: ``mute`` says no address, the keys of ``FIRST_LINES`` say
something else, ``fails`` ends before it does, ``fails_if_full`` also where a file ``full`` is beside its log,
``brittle`` ends at the first rank's call, ``stubborn`` outlives its standard input.
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
    """Serve until standard input closes."""
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
    """Answer one message per connection."""
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

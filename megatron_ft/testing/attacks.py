"""Attacks the ports and unix sockets of a job as a hostile peer might, and classifies the response to each attack."""

import contextlib
import functools
import json
import random
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]

SOCKET_SECONDS = 10.0
REFUSED, ANSWERED, SILENT = "refused", "answered", "silent"
"""Responses of an attacked process. ``refused``: the process sent an error or closed the connection. ``answered``: it
sent a valid answer. ``silent``: it waits for more data."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
OVERSIZED_BYTES = 33 * 1024 * 1024
TOKEN_KEY = "x-megatron-ft-token"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes.fromhex("000000040000000000")


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack on a process, with the responses that are allowed (``refused``, ``answered``, ``silent``)."""

    name: str
    send: Callable[[], str]
    """Runs the attack and returns the response."""
    allowed: frozenset[str]


def frame(payload: bytes) -> bytes:
    """Return a message in the format of a job's unix sockets: the length in four bytes, then ``payload``."""
    return struct.pack(">I", len(payload)) + payload


def say(message: Any) -> bytes:
    """Return ``message`` as JSON in the format of a job's unix sockets."""
    return frame(json.dumps(message).encode())


def connect(address: str) -> socket.socket:
    """Connect to ``address``: ``host:port`` or the path of a unix socket."""
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(SOCKET_SECONDS)
        sock.connect(address)
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=SOCKET_SECONDS)


def throw(address: str, data: bytes, *, wait_seconds: float = 0.3) -> str:
    """Send ``data`` and return the kind of response. An error message or a closed connection counts as ``refused``."""
    with contextlib.closing(connect(address)) as sock:
        sock.settimeout(wait_seconds)
        try:
            sock.sendall(data)
            answer = sock.recv(65536)
        except TimeoutError:
            return SILENT
        except OSError:
            return REFUSED
        return REFUSED if not answer or b'"error"' in answer else ANSWERED


@contextlib.contextmanager
def crowd(address: str, count: int, data: bytes = b"") -> Iterator[int]:
    """Open up to ``count`` connections, send ``data`` on each, and keep them open during the ``with`` block. Yield the
    number of accepted connections."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            try:
                sock = connect(address)
            except OSError:
                break  # the listener's queue is full, so it may refuse more connections
            held.append(sock)
            with contextlib.suppress(OSError):
                sock.sendall(data)
        yield len(held)
    finally:
        for sock in held:
            sock.close()


def headers_without_body(path: str, token: str | None = None) -> bytes:
    """Return the HTTP/2 bytes of a gRPC call without its body. A server that receives them waits for the body."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    fields += [] if token is None else [(TOKEN_KEY, token)]
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    head = struct.pack(">I", len(block))[1:] + b"\x01\x04" + struct.pack(">I", 1)
    return _PREFACE + _SETTINGS + head + block


def _text(value: str) -> bytes:
    data = value.encode()
    assert len(data) < 127, "lengths of more than seven bits are not needed"
    return bytes([len(data)]) + data


class Caller:
    """gRPC client that can send arbitrary bytes as the body of a call."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.insecure_channel(address, options=options)

    def call(self, method: str, body: bytes, metadata: Sequence[tuple[str, str]], *, seconds: float = 10.0) -> str:
        """Call a gRPC method. Return the kind of response: ``refused``, ``answered`` or ``no answer (STATUS)``."""
        try:
            self._channel.unary_unary(method)(body, timeout=seconds, metadata=tuple(metadata))
        except grpc.RpcError as error:
            code = error.code()
            return f"no answer ({code.name})" if code in _NO_ANSWER else REFUSED
        return ANSWERED

    def ask(self, method: str, body: Mapping[str, Any], metadata: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Make a valid call and return its answer. Raise ``grpc.RpcError`` if the call fails."""
        stub = self._channel.unary_unary(method)
        answer: dict[str, Any] = json.loads(stub(json.dumps(body).encode(), timeout=10, metadata=tuple(metadata)))
        return answer

    def close(self) -> None:
        """Close the gRPC channel."""
        self._channel.close()


_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)
"""gRPC status codes which mean that the attacked server has ended, hangs, or crashed in the request."""


def controller_attacks(caller: Caller, token: str, rng: random.Random, *, num_nodes: int) -> Iterator[Attack]:
    """Yield attacks on the controller: calls without a token, with a wrong token, and with the right token but
    invalid content."""
    refused = frozenset((REFUSED,))
    methods = ("join", "poll", "deliver", "status", "drain", "add", "nothing")
    hostile: Mapping[str, list[tuple[str, str]]] = {
        "no token": [],
        "empty token": [(TOKEN_KEY, "")],
        "another token": [(TOKEN_KEY, f"{rng.getrandbits(256):064x}")],
        "half a token": [(TOKEN_KEY, token[:32])],
        "two tokens": [(TOKEN_KEY, token), (TOKEN_KEY, "x")],
    }
    for who, metadata in hostile.items():
        for method in methods:
            yield _call(
                caller,
                f"{who}, {method}",
                method,
                b'{"node":0,"session":0,"after":0,"wait_seconds":0}',
                metadata,
                refused,
            )
    big = b'{"node":0,"x":"' + b"a" * OVERSIZED_BYTES + b'"}'
    yield _call(caller, "oversized, no token", "poll", big, [], refused)
    mine = [(TOKEN_KEY, token)]
    yield _call(caller, "oversized", "poll", big, mine, refused)
    for name, body in malformed_bodies(rng).items():
        for method in ("join", "poll", "deliver", "nothing"):
            yield _call(caller, f"{name}, {method}", method, body, mine, refused)
    for name, items in malformed_items(num_nodes).items():
        yield Attack(f"controller: item: {name}", functools.partial(_deliver_next, caller, mine, items), refused)
    replayed = json.dumps({"node": 0, "session": 0, "first": 0, "items": [_exited(0)]}).encode()
    yield _call(caller, "replayed items", "deliver", replayed, mine, frozenset((ANSWERED,)))
    stale = json.dumps({"node": 0, "session": 7, "first": 0, "items": [_exited(0)]}).encode()
    yield _call(caller, "a process without a session", "deliver", stale, mine, refused)
    ahead = json.dumps({"node": 0, "session": 0, "first": 10**9, "items": [_record({"kind": "note"})]}).encode()
    yield _call(caller, "items with a future number", "deliver", ahead, mine, refused)


def _deliver_next(caller: Caller, metadata: Sequence[tuple[str, str]], items: Sequence[Any]) -> str:
    """Send 100 copies of ``items`` to the controller, as messages of node 0 with the next expected sequence numbers.

    One copy is not enough: the node's agent may use the next number first, and the controller ignores used numbers.
    """
    answer = caller.ask("/Controller/deliver", {"node": 0, "session": 0, "first": 0, "items": []}, metadata)
    body = {"node": 0, "session": 0, "first": answer["next"], "items": list(items) * 100}
    return caller.call("/Controller/deliver", json.dumps(body).encode(), metadata)


def malformed_bodies(rng: random.Random) -> dict[str, bytes]:
    """Return invalid bodies of calls to the controller, by name. No method of the controller accepts them."""
    return {
        "empty": b"",
        "no JSON": b"{",
        "a list": b"[]",
        "random bytes": rng.randbytes(200),
        "no UTF-8": b'{"node":"\xff\xfe"}',
        "deep nesting": b'{"node":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "a long number": b'{"node":' + b"9" * 100_000 + b"}",
        "an infinite node": b'{"node":Infinity}',
        "a node as a list": b'{"node":[0]}',
        "a node that does not exist": b'{"node":-1,"session":0,"after":0,"first":0,"items":[],"wait_seconds":0}',
    }


def malformed_items(num_nodes: int) -> dict[str, list[Any]]:
    """Return invalid messages by name. The controller must refuse each if it arrives as a message of node 0."""
    hello = {"op": "reported", "rank": 0, "start": 0, "generation": 0}
    position = {"rank": 0, "generation": 0, "completed": 10**6, "contributed": 3, "vote": None}
    broken = {"op": "broken", "rank": 0, "start": 0, "generation": 0, "at_seconds": 0.0, "position": position}
    return {
        "no object": [1],
        "no op": [{}],
        "unknown op": [{**hello, "op": "end"}],
        "op as a list": [{**hello, "op": ["reported"]}],
        "another node's rank": [{**hello, "rank": num_nodes - 1}],
        "a rank that does not exist": [{**hello, "rank": 10**6}],
        "a rank as text": [{**hello, "rank": "0"}],
        "a rank as a fraction": [{**hello, "rank": 0.5}],
        "a generation to come": [{**hello, "generation": 7}],
        "a generation as text": [{**hello, "generation": "0"}],
        "a negative generation": [{**hello, "generation": -1}],
        "a record that is missing": [{"op": "record", "rank": 0, "start": 0, "generation": 0}],
        "a record that is a list": [_record([])],
        "an exit without a code": [{k: v for k, v in _exited(0).items() if k != "returncode"}],
        "an exit without a time": [{**_exited(0), "at_seconds": "now"}],
        "an exit at an infinite time": [{**_exited(0), "at_seconds": float("nan")}],
        "an exit code as text": [{**_exited(0), "returncode": "0"}],
        "a position from afar": [broken],
        "an invalid position": [{**broken, "position": [1, 2]}],
        "a position of another": [{**broken, "position": {**position, "rank": 1, "contributed": 10**6}}],
        "a raise without a time": [{"op": "raised", "rank": 0, "start": 0, "generation": 0}],
    }


def _exited(rank: int) -> dict[str, Any]:
    return {
        "op": "exited",
        "rank": rank,
        "start": 0,
        "generation": 0,
        "returncode": 1,
        "at_seconds": 0.0,
        "done": False,
    }


def _record(record: Any) -> dict[str, Any]:
    return {"op": "record", "rank": 0, "start": 0, "generation": 0, "record": record}


def _call(
    caller: Caller, name: str, method: str, body: bytes, metadata: Sequence[tuple[str, str]], allowed: frozenset[str]
) -> Attack:
    return Attack(f"controller: {name}", lambda: caller.call(f"/Controller/{method}", body, metadata), allowed)


def port_attacks(name: str, address: str, token: str, rng: random.Random) -> Iterator[Attack]:
    """Yield attacks on a gRPC port: bytes that are not HTTP/2, and HTTP/2 that is cut off."""
    anything = frozenset((REFUSED, ANSWERED, SILENT))
    whole = headers_without_body("/Controller/poll", token)
    for size in (1, 24, 1000, 100_000):
        yield _throw(f"{name}: {size} random bytes", address, rng.randbytes(size), anything)
    for _ in range(8):
        cut = rng.randrange(1, len(whole))
        yield _throw(f"{name}: HTTP/2 cut after {cut} bytes", address, whole[:cut], anything)
    yield _throw(f"{name}: a frame of 16 MiB announced", address, whole + b"\xff\xff\xff\x00\x00\0\0\0\1", anything)
    yield _throw(f"{name}: HTTP/1", address, b"GET / HTTP/1.1\r\n\r\n", anything)


def greetings(rank: int) -> dict[str, bytes]:
    """Return invalid first messages of a rank to its node agent's socket, by name."""
    hello = {"op": "hello", "rank": rank, "start": 0, "generation": 0}
    return {
        "another rank 0": say(hello),
        "a rank that does not exist": say({**hello, "rank": 10**6}),
        "a rank as a list": say({**hello, "rank": [0]}),
        "a rank as an object": say({**hello, "rank": {}}),
        "a stale generation": say({**hello, "generation": -1}),
        "no op": say({"rank": rank}),
        "another op": say({**hello, "op": "done"}),
        "no object": say([1, 2]),
        "no JSON": frame(b"{"),
        "deep nesting": frame(b"[" * 200_000),
        "an empty frame": frame(b""),
        "an oversized frame": struct.pack(">I", MAX_FRAME_BYTES + 1),
        "the longest length": b"\xff\xff\xff\xff",
    }


def requests() -> dict[str, bytes]:
    """Return invalid requests to a fork server, by name."""
    return {
        "spawn without a log": say({"op": "spawn", "rank": 0, "spec": {}}),
        "spawn of a list": say({"op": "spawn", "rank": [], "spec": []}),
        "unknown op": say({"op": "end"}),
        "op as a list": say({"op": []}),
        "no op": say({"rank": 0}),
        "no signal": say({"op": "signal", "rank": 0}),
        "no object": say([1]),
        "no JSON": frame(b"{"),
        "deep nesting": frame(b"[" * 200_000),
        "an oversized frame": struct.pack(">I", MAX_FRAME_BYTES + 1),
        "the longest length": b"\xff\xff\xff\xff",
    }


def keeper_words(token: str) -> dict[str, bytes]:
    """Return invalid first messages to a snapshot server, by name."""
    hello = {"op": "hello", "token": token, "node": 1, "run_id": "x", "generation": 0, "replicates": True}
    return {
        "another token": say({**hello, "token": "0" * 64}),
        "no token": say({name: value for name, value in hello.items() if name != "token"}),
        "a token as a list": say({**hello, "token": []}),
        "a stale generation": say({**hello, "generation": -1}),
        "a node as text": say({**hello, "node": "one"}),
        "no op": say({"token": token}),
        "another op": say({**hello, "op": "slice"}),
        "no object": say([1]),
        "no JSON": frame(b"{"),
        "a greeting too long": frame(b'"' + b"x" * 20_000 + b'"'),
        "an oversized frame": struct.pack(">I", MAX_FRAME_BYTES + 1),
        "the longest length": b"\xff\xff\xff\xff",
    }


def stream_attacks(name: str, address: str, words: Mapping[str, bytes], rng: random.Random) -> Iterator[Attack]:
    """Yield attacks on a socket: complete invalid messages ``words``, which must be refused, and cut-off messages and
    random bytes, which must have no effect."""
    for what, data in words.items():
        yield _throw(f"{name}: {what}", address, data, frozenset((REFUSED,)), wait_seconds=SOCKET_SECONDS)
    whole = say({"op": "hello", "rank": 0, "start": 0, "generation": 0, "token": "x"})
    for _ in range(6):
        cut = rng.randrange(1, len(whole))
        yield _throw(f"{name}: cut after {cut} bytes", address, whole[:cut], frozenset((SILENT,)))
    for size in (1, 100, 10_000):
        data = rng.randbytes(size)
        yield _throw(f"{name}: {size} random bytes", address, data, frozenset((REFUSED, SILENT)))


def _throw(name: str, address: str, data: bytes, allowed: frozenset[str], *, wait_seconds: float = 0.3) -> Attack:
    return Attack(name, lambda: throw(address, data, wait_seconds=wait_seconds), allowed)

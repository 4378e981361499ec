"""Attacks of hostile peers on every kind of listener of a job, each with an outcome that can be counted."""

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
"""Outcomes of a peer: it refused or closed; it gave a proper answer; it waits for more."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
OVERSIZED_BYTES = 33 * 1024 * 1024
TOKEN_KEY = "x-megatron-ft-token"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes.fromhex("000000040000000000")


@dataclass(frozen=True, slots=True)
class Attack:
    """One thing to send, and its allowed outcomes."""

    name: str
    send: Callable[[], str]
    """Sends it; returns the outcome."""
    allowed: frozenset[str]


def frame(payload: bytes) -> bytes:
    """Four bytes of length, then the bytes."""
    return struct.pack(">I", len(payload)) + payload


def say(message: Any) -> bytes:
    """A message of the local sockets."""
    return frame(json.dumps(message).encode())


def connect(address: str) -> socket.socket:
    """``host:port`` or the path of a unix socket."""
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(SOCKET_SECONDS)
        sock.connect(address)
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=SOCKET_SECONDS)


def throw(address: str, data: bytes, *, wait_seconds: float = 0.3) -> str:
    """Send ``data`` and see what comes back: an error message or the end of the connection is a refusal."""
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
    """``count`` connections held open, each after sending ``data``; returns how many were accepted."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            try:
                sock = connect(address)
            except OSError:
                break  # the listener's queue is full: it takes no more, which is its right
            held.append(sock)
            with contextlib.suppress(OSError):
                sock.sendall(data)
        yield len(held)
    finally:
        for sock in held:
            sock.close()


def headers_without_body(path: str, token: str | None = None) -> bytes:
    """HTTP/2 up to the headers of a call whose body never comes."""
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
    """Calls a gRPC server with bodies of any bytes."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.insecure_channel(address, options=options)

    def call(self, method: str, body: bytes, metadata: Sequence[tuple[str, str]], *, seconds: float = 10.0) -> str:
        """The outcome of one call."""
        try:
            self._channel.unary_unary(method)(body, timeout=seconds, metadata=tuple(metadata))
        except grpc.RpcError as error:
            code = error.code()
            return f"no answer ({code.name})" if code in _NO_ANSWER else REFUSED
        return ANSWERED

    def ask(self, method: str, body: Mapping[str, Any], metadata: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """A proper call's answer. Raises ``grpc.RpcError``."""
        stub = self._channel.unary_unary(method)
        answer: dict[str, Any] = json.loads(stub(json.dumps(body).encode(), timeout=10, metadata=tuple(metadata)))
        return answer

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)
"""The server has gone, hangs, or fell over the request."""


def controller_attacks(caller: Caller, token: str, rng: random.Random, *, num_nodes: int) -> Iterator[Attack]:
    """Calls without, with a wrong and with the right token."""
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
    yield _call(caller, "a process that has no session", "deliver", stale, mine, refused)
    ahead = json.dumps({"node": 0, "session": 0, "first": 10**9, "items": [_record({"kind": "note"})]}).encode()
    yield _call(caller, "items from the future", "deliver", ahead, mine, refused)


def _deliver_next(caller: Caller, metadata: Sequence[tuple[str, str]], items: Sequence[Any]) -> str:
    """Deliver ``items`` where node 0's next ones are expected. Those that its agent was faster with count for nothing,
    so there are enough of them."""
    answer = caller.ask("/Controller/deliver", {"node": 0, "session": 0, "first": 0, "items": []}, metadata)
    body = {"node": 0, "session": 0, "first": answer["next"], "items": list(items) * 100}
    return caller.call("/Controller/deliver", json.dumps(body).encode(), metadata)


def malformed_bodies(rng: random.Random) -> dict[str, bytes]:
    """Bodies that are no request, by name."""
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
        "a node that is none": b'{"node":-1,"session":0,"after":0,"first":0,"items":[],"wait_seconds":0}',
    }


def malformed_items(num_nodes: int) -> dict[str, list[Any]]:
    """Messages that node 0 cannot have sent, by name."""
    hello = {"op": "reported", "rank": 0, "start": 0, "generation": 0}
    position = {"rank": 0, "generation": 0, "completed": 10**6, "contributed": 3, "vote": None}
    broken = {"op": "broken", "rank": 0, "start": 0, "generation": 0, "at_seconds": 0.0, "position": position}
    return {
        "no object": [1],
        "no op": [{}],
        "unknown op": [{**hello, "op": "end"}],
        "op as a list": [{**hello, "op": ["reported"]}],
        "another node's rank": [{**hello, "rank": num_nodes - 1}],
        "a rank that is none": [{**hello, "rank": 10**6}],
        "a rank as text": [{**hello, "rank": "0"}],
        "a rank as a fraction": [{**hello, "rank": 0.5}],
        "a generation to come": [{**hello, "generation": 7}],
        "a generation as text": [{**hello, "generation": "0"}],
        "a negative generation": [{**hello, "generation": -1}],
        "a record that is missing": [{"op": "record", "rank": 0, "start": 0, "generation": 0}],
        "a record that is a list": [_record([])],
        "an exit without a code": [{k: v for k, v in _exited(0).items() if k != "returncode"}],
        "an exit at no time": [{**_exited(0), "at_seconds": "now"}],
        "an exit at infinity": [{**_exited(0), "at_seconds": float("nan")}],
        "an exit in words": [{**_exited(0), "returncode": "0"}],
        "a position from afar": [broken],
        "a position that is none": [{**broken, "position": [1, 2]}],
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
    """Bytes that are no HTTP/2, and HTTP/2 that breaks off, at a gRPC port."""
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
    """First words to a node agent's socket that are no rank's, by name."""
    hello = {"op": "hello", "rank": rank, "start": 0, "generation": 0}
    return {
        "another rank 0": say(hello),
        "a rank that is none": say({**hello, "rank": 10**6}),
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
    """Requests that no agent sends to a fork server, by name."""
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
    """Invalid first frames to a snapshot server, by name."""
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
    """Whole first messages, which must be refused; and random, cut and silent ones, which must have no effect."""
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

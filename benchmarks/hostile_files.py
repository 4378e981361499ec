"""Makes files that replace those of an intact window or checkpoint and are designed to harm their readers. Their
checksums are valid."""

import json
import os
import pickle
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME
from megatron_ft.snapshot.storage.window_file import rank_name
from megatron_ft.testing.jobs import inside
from megatron_ft.testing.stored_samples import NEW, WORLD_SIZE, forge, sample_name, sample_window

MARKER = "executed"
"""File that code hidden in a hostile file would create in the working directory."""
HUGE = 1 << 40
NAMES = (
    *("", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "//x", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/"),
    *("\0", "a\0b", "a\0/../b", "a\nb", "a\rb", "a\tb", "a b", " a", "a ", "\x1b[2J", "\x7f", "a\u202eb", "\ufeffa"),
    *("\uff0e\uff0e/x", "..\u2215x", "\u00e9", "e\u0301", "\ud800", "\U0001f4a3", "C:\\x", "..\\x", "\\\\host\\share"),
    *("$HOME", "${x}", "`x`", "$(x)", "|x", ";x", "a*", "a?", "[a]", "%2e%2e%2fx", "a%00b", "file:///etc/passwd"),
    *("s3://x/y", "<script>", "'", '"', "a" * 5000, "/dev/zero", "/proc/self/mem", "~/x", "~root/x"),
)
BAD_INTEGERS = (-1, -(2**63), 2**63, 2**64, 10**30, 1.5, True, "1", None, [1], {"a": 1})


class Payload:
    """Object that creates :data:`MARKER` if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (MARKER,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """Hostile file of one kind."""

    name: str
    put: Callable[[Path], Path]
    """Replaces an intact file of the newest sample in the given folder by the hostile file, and returns the path."""


def hostile_windows() -> list[Hostile]:
    """Return hostile files that replace a window's file."""
    return [*_window_texts(), *_window_integers(), *_window_layouts(), *_window_heads(), *_odd_files(_window_victim)]


def hostile_checkpoints() -> list[Hostile]:
    """Return hostile files that replace a file of a dense checkpoint."""
    return [*_dense_manifests(), *_dense_bytes(), *_odd_files(_dense_victim), *_odd_files(_manifest_victim)]


def _window_victim(folder: Path) -> Path:
    return folder / sample_name(NEW) / rank_name(WORLD_SIZE - 1)


def _dense_victim(folder: Path) -> Path:
    return folder / directory_name(NEW) / "common.pt"


def _manifest_victim(folder: Path) -> Path:
    return folder / directory_name(NEW) / MANIFEST_NAME


def _put(path_of: Callable[[Path], Path], content: bytes, folder: Path) -> Path:
    path = path_of(folder)
    path.write_bytes(content)
    return path


def _window_body() -> dict[str, Any]:
    window, _ = sample_window(NEW, WORLD_SIZE - 1)
    return json.loads(window.to_bytes())  # type: ignore[no-any-return]


def _window_payload() -> bytes:
    return b"".join(sample_window(NEW, WORLD_SIZE - 1)[1])


def _window(name: str, change: Callable[[dict[str, Any]], object]) -> Hostile:
    body = _window_body()
    change(body)
    content = forge(json.dumps(body).encode(), _window_payload())
    return Hostile(name=f"window: {name}", put=partial(_put, _window_victim, content))


def _raw_window(name: str, manifest: bytes, payload: bytes | None = None, **head: Any) -> Hostile:
    content = forge(manifest, _window_payload() if payload is None else payload, **head)
    return Hostile(name=f"window: {name}", put=partial(_put, _window_victim, content))


def _setter(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


_PIECE = ("slices", 0, "pieces", 1)
_ROW = {
    "parameter": 0,
    "tensor_part": 1,
    "component": 2,
    "dtype": 3,
    "start": 4,
    "stop": 5,
    "offset": 6,
    "num_bytes": 7,
}


def _window_texts() -> Iterator[Hostile]:
    for text in NAMES:
        for name in ("parameter", "component", "dtype"):
            if not (name == "parameter" and text == "a"):
                yield _window(f"{name}={text[:20]!r}", _setter(*_PIECE, _ROW[name], value=text))
    for text in ("", "a\0b", "a\nb", "../x", "/etc", "a" * 300, "\x1b[2J", "a\x7f"):
        yield _window(f"run_id={text[:20]!r}", _setter("run_id", value=text))
    for text in ("", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 31 + "\n", "0" * 32, None, 0):
        yield _window(f"xxh3_128={text!r}", _setter(*_PIECE, 8, value=text))


def _window_integers() -> Iterator[Hostile]:
    places: dict[str, tuple[str | int, ...]] = {
        name: (name,)
        for name in ("generation", "rank", "world_size", "start_iteration", "num_slices", "format_version")
    }
    places |= {name: ("slices", 1, name) for name in ("iteration", "offset", "num_bytes")}
    places |= {
        f"piece.{name}": (*_PIECE, _ROW[name]) for name in ("tensor_part", "start", "stop", "offset", "num_bytes")
    }
    places["topology"] = ("topology", "data_parallel")
    for name, path in places.items():
        for value in BAD_INTEGERS:
            yield _window(f"{name}={value!r}", _setter(*path, value=value))
    for name, value in (("offset", 4095), ("offset", 0), ("offset", HUGE), ("num_bytes", HUGE), ("iteration", NEW)):
        yield _window(f"slice {name}={value}", _setter("slices", 1, name, value=value))
    for name, value in (("stop", 2**62), ("stop", 2**61), ("offset", 2**62), ("num_bytes", 2**62), ("num_bytes", 0)):
        yield _window(f"piece {name}={value}", _setter(*_PIECE, _ROW[name], value=value))
    for name, value in (("rank", 0), ("world_size", 3), ("world_size", 1), ("start_iteration", 1), ("generation", 1)):
        yield _window(f"{name}={value}", _setter(name, value=value))


def _overlap(body: dict[str, Any]) -> None:
    pieces = body["slices"][0]["pieces"]
    pieces[1][6] = pieces[0][6]


def _window_layouts() -> Iterator[Hostile]:
    body = _window_body()
    for name in body:
        yield _window(f"without {name}", lambda b, name=name: b.pop(name))
        yield _window(f"{name} is null", _setter(name, value=None))
        yield _window(f"{name} is a list of itself", lambda b, name=name: b.update({name: [[b[name]]]}))
    for name in body["slices"][0]:
        yield _window(f"slice without {name}", lambda b, name=name: b["slices"][0].pop(name))
    yield _window("unknown field", _setter("code", value="import os"))
    yield _window("unknown field of a slice", _setter("slices", 0, "code", value=1))
    yield _window("overlapping pieces", _overlap)
    yield _window("pieces out of order", lambda b: b["slices"][0]["pieces"].reverse())
    yield _window("a piece twice", lambda b: b["slices"][0]["pieces"].append(b["slices"][0]["pieces"][-1]))
    yield _window("elements twice", lambda b: b["slices"][0]["pieces"][2].__setitem__(2, "master"))
    yield _window("a piece outside its slice", _setter("slices", 0, "num_bytes", value=4096))
    yield _window("a short row", lambda b: b["slices"][0]["pieces"][0].pop())
    yield _window("a long row", lambda b: b["slices"][0]["pieces"][0].append(0))
    yield _window("a row that is an object", _setter(*_PIECE, value={"parameter": "a"}))
    yield _window("a slice twice", lambda b: b["slices"].append(deepcopy(b["slices"][0])))
    yield _window("slices swapped", lambda b: b["slices"].reverse())
    yield _window("no slices", lambda b: b.update(slices=[], num_slices=0))
    yield _window("other plan than rank 0", _setter("plan", value={"slices": []}))
    yield _window("NaN in a header", _setter("slices", 0, "header", value={"loss": float("nan")}))
    yield _window("infinity in a header", _setter("slices", 0, "header", value={"loss": float("inf")}))


def _window_heads() -> Iterator[Hostile]:
    good = json.dumps(_window_body()).encode()
    deep = good.replace(b'"plan":', b'"plan":' + b"[" * 100_000 + b"]" * 100_000 + b',"plan":', 1)
    yield _raw_window("100,000 nested lists", deep)
    yield _raw_window("1,000,000 nested objects", b'{"a":' * 1_000_000)
    yield _raw_window("a key twice", good.replace(b"{", b'{"rank": 0, ', 1))
    yield _raw_window("a number of 1,000,000 digits", good.replace(b'"rank": 1', b'"rank": ' + b"9" * 1_000_000))
    yield _raw_window("1e999 in a header", good.replace(b"2.5", b"1e999", 1))
    for name, manifest in {
        "pickle as manifest": pickle.dumps(Payload()),
        "pickle protocol 0 as manifest": pickle.dumps(Payload(), protocol=0),
        "empty manifest": b"",
        "null": b"null",
        "list": b"[]",
        "number": b"1",
        "string": b'"a"',
        "UTF-16": good.decode().encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + good,
        "invalid UTF-8": good.replace(b"run-1", b"run\xff1"),
        "trailing bytes": good + b"x",
        "cut JSON": good[:-1],
        "comment": b"/* */" + good,
        "single quotes": good.replace(b'"', b"'"),
        "zeros": bytes(len(good)),
    }.items():
        yield _raw_window(name, manifest)
    for version in (0, 1, 3, 255, 2**31, 2**32 - 1):
        yield _raw_window(f"version {version}", good, version=version)
    for length in (0, 1, len(good) - 1, len(good) + 1, HUGE, 2**31, 2**32, 2**63, 2**64 - 1):
        yield _raw_window(f"manifest of {length} bytes", good, length=length)
    for magic in (b"PK\x03\x04\0\0\0\0", b"\x80\x04\x95\0\0\0\0\0", b"\x7fELF\0\0\0\0", bytes(8), b"\x89MFTWIN\r"):
        yield _raw_window(f"magic {magic!r}", good, magic=magic)
    for payload in (b"", _window_payload() + b"\0", _window_payload()[:-1], pickle.dumps(Payload())):
        yield _raw_window(f"payload of {len(payload)} bytes", good, payload)
    yield Hostile(name="window: a pickle", put=partial(_put, _window_victim, pickle.dumps(Payload())))


def _dense_manifest(name: str, change: Callable[[dict[str, Any]], object]) -> Hostile:
    def put(folder: Path) -> Path:
        path = _manifest_victim(folder)
        body = json.loads(path.read_bytes())
        body.pop("manifest_xxh3_128")
        change(body)
        content = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        body["manifest_xxh3_128"] = xxhash.xxh3_128_hexdigest(content)
        path.write_text(json.dumps(body))
        return path.parent

    return Hostile(name=f"manifest: {name}", put=put)


def _dense_manifests() -> Iterator[Hostile]:
    for text in NAMES:
        yield _dense_manifest(f"file {text[:20]!r}", _setter("files", 0, "name", value=text))
    numbers = ("iteration", "generation", "consumed_samples", "format_version")
    for name in (*numbers, "topology", "files", "run_id", "run_name", "settings"):
        yield _dense_manifest(f"without {name}", lambda b, name=name: b.pop(name))
        yield _dense_manifest(f"{name} is null", _setter(name, value=None))
    wrong = (-1, 1.5, True, "1", None, [1])
    for name in ("iteration", "generation", "consumed_samples", "format_version"):
        for value in wrong:
            if (name, value) != ("format_version", True):
                yield _dense_manifest(f"{name}={value!r}", _setter(name, value=value))
    for value in (*wrong, 2**63, 2**64, 10**30, HUGE, 0):
        yield _dense_manifest(f"num_bytes={value!r}", _setter("files", 0, "num_bytes", value=value))
    for text in ("", "0" * 31, "G" * 32, "A" * 32, "0" * 32, None, 0):
        yield _dense_manifest(f"xxh3_128={text!r}", _setter("files", 0, "xxh3_128", value=text))
    yield _dense_manifest("a file twice", lambda b: b["files"].append(b["files"][0]))
    yield _dense_manifest("a file left out", lambda b: b["files"].pop())
    yield _dense_manifest("itself", _setter("files", 0, "name", value=MANIFEST_NAME))
    yield _dense_manifest("version 3", _setter("format_version", value=3))
    yield _dense_manifest("version 1 with fields of version 2", _setter("format_version", value=1))
    yield _dense_manifest("NaN", _setter("consumed_samples", value=float("nan")))


def _dense_bytes() -> Iterator[Hostile]:
    for name, content in {
        "pickle": pickle.dumps(Payload()),
        "empty": b"",
        "list": b"[]",
        "null": b"null",
        "100,000 nested lists": b"[" * 100_000,
        "a key twice": b'{"run_id": "a", "run_id": "b"}',
        "a number of 1,000,000 digits": b'{"format_version": ' + b"9" * 1_000_000 + b"}",
        "invalid UTF-8": b'{"run_id": "\xff"}',
        "zeros": bytes(4096),
    }.items():
        yield Hostile(name=f"manifest: {name}", put=partial(_put, _manifest_victim, content))
    yield Hostile(name="data file: pickle", put=partial(_put, _dense_victim, pickle.dumps(Payload())))


ODD_FILES: Mapping[str, Callable[[Path], object]] = {
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "sparse file of 1 TiB": lambda path: (path.touch(), os.truncate(path, HUGE)),
}
"""Functions that create something that is not a regular file at a path, by name."""


def _odd_files(victim: Callable[[Path], Path]) -> Iterator[Hostile]:
    """Yield special files under the name of ``victim``: files that are not regular, endless, sparse or empty."""
    makers: dict[str, Callable[[Path], object]] = {
        **ODD_FILES,
        "link to a sound file": _link_to_itself,
        "link to /etc/passwd": lambda path: path.symlink_to("/etc/passwd"),
        "link to a directory": lambda path: path.symlink_to("."),
        "socket": _socket,
        "empty file": lambda path: path.touch(),
    }
    if os.geteuid() == 0:
        makers["device /dev/zero"] = lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        makers["device /dev/full"] = lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
    for name, make in makers.items():
        yield Hostile(name=f"{victim(Path()).name}: {name}", put=partial(_replace, victim, make))


def _replace(victim: Callable[[Path], Path], make: Callable[[Path], object], folder: Path) -> Path:
    path = victim(folder)
    if make is not _link_to_itself:
        path.unlink()
    make(path)
    return path.parent


def _link_to_itself(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere_{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _socket(path: Path) -> None:
    """Bind a unix socket by a short relative path, because the length of a socket's path is limited."""
    with inside(path.parent), socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path.name)

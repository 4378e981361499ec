"""File of one rank's part of a window: written completely or not at all, and verified before use.

::

    8 bytes    magic
    4          format version           (numbers are little endian)
    8          size of the manifest in bytes
    16         xxh3_128 of the manifest
    ...        manifest, strict JSON
    ...        zeros up to a multiple of 4096
    ...        payload: the slices, with zeros between pieces
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import xxhash

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import WindowKey, align
from megatron_ft.snapshot.storage.backends import Backend, Source, open_backend
from megatron_ft.snapshot.storage.manifest import MAX_MANIFEST_BYTES, parse_object
from megatron_ft.snapshot.window import WINDOW_FORMAT_VERSION, Slice, Window, check_version

MAGIC = b"\x89MFTWIN\n"
_HEADER = struct.Struct("<8sIQ16s")
_CHUNK_BYTES = 4 << 20
_ZEROS = bytes(1 << 16)


def window_name(key: WindowKey) -> str:
    """Return the name of a window's directory. It differs if a later generation captures the same iterations again."""
    return f"window_{key.start_iteration:07d}" + (f".{key.generation}" if key.generation else "")


def rank_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.window"


def write_window(folder: Path | str, window: Window, payload: Sequence[memoryview]) -> int:
    """Write a rank's part of a window below ``folder``, a path or URL. When this returns, the file is on storage.

    Zeros are written for padding, whatever the memory contains there. An existing valid file with the same content is
    kept, and a damaged one is replaced.

    Args:
        payload: the bytes of each slice; slice i has ``window.slices[i].num_bytes`` bytes.

    Returns:
        Size of the file in bytes.

    Raises:
        CheckpointError: the storage fails, the payload does not match the window, or a valid file with other content
            exists. An existing file is then unchanged.
    """
    head = _head(window)
    sizes = [view.nbytes for view in payload]
    assert sizes == [part.num_bytes for part in window.slices], f"payload of {sizes} bytes does not match the slices"
    backend = open_backend(folder)
    directory, name = window_name(window.key), rank_name(window.rank)
    where = backend.describe(directory, name)
    try:
        # A restart may write a window again: a file that is sound and equal is not touched, for others may read it.
        if not _is_there(backend, directory, name, window):
            backend.write(directory, name, _chunks(head, window, payload, where))
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be written: {error}") from error
    return len(head) + window.num_bytes


class WindowFile:
    """An open window file. Bytes are read on request and verified before they are returned."""

    def __init__(self, where: str, open_source: Callable[[], Source], expect: Mapping[str, object]) -> None:
        self.path = where
        self._source: Source | None = None
        try:
            self._source = open_source()
            self.window, self._payload_start = _read_head(self._source)
            _check_expected(self.window, expect)
        except (OSError, CheckpointError) as error:
            # The error is raised from the constructor: no ``with`` block would close the file.
            self.close()
            message = str(error)
            raise CheckpointError(message if message.startswith(where) else f"{where}: {message}") from error

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._payload_start + self.window.num_bytes

    def read_slice(self, index: int, into: memoryview | None = None) -> memoryview:
        """Read and verify slice ``index``. Its bytes are written to ``into``, of the same size, or to new memory.

        Raises:
            CheckpointError: a piece is damaged, padding is not zero, or the storage fails. ``into`` may then contain
                unverified bytes.
        """
        part = self.window.slices[index]
        buffer = memoryview(bytearray(part.num_bytes)) if into is None else into.cast("B")
        assert buffer.nbytes == part.num_bytes, f"buffer of {buffer.nbytes} bytes for a slice of {part.num_bytes}"
        self._check(part, buffer)
        return buffer

    def verify(self) -> Window:
        """Verify the whole payload and return the window. Raises the same errors as ``read_slice``."""
        position = 0
        for part in self.window.slices:
            # Bytes between slices belong to no piece; they are zeros in every sound file, so damage there counts too.
            for view in self._read(position, part.offset):
                _check_zeros(view, f"{self.path}: padding before the slice of iteration {part.iteration}")
            self._check(part, None)
            position = part.end
        return self.window

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._source is not None:
            self._source.close()
        self._source = None

    def __enter__(self) -> "WindowFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, part: Slice, target: memoryview | None) -> None:
        for start, stop, piece in part.extents():
            digest = xxhash.xxh3_128()
            for view in self._read(part.offset + start, part.offset + stop, target and target[start:stop]):
                if piece is None:
                    _check_zeros(view, f"{self.path}: slice of iteration {part.iteration}")
                else:
                    digest.update(view)
            if piece is not None:
                part.check_hash(piece, digest.hexdigest(), self.path)

    def _read(self, start: int, stop: int, target: memoryview | None = None) -> Iterator[memoryview]:
        assert self._source is not None, f"{self.path}: closed"
        if target is None:
            scratch = memoryview(bytearray(min(_CHUNK_BYTES, stop - start)))
        for position in range(start, stop, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, stop - position)
            view = scratch[:size] if target is None else target[position - start : position - start + size]
            try:
                self._source.read_into(self._payload_start + position, view)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {error}") from error
            yield view

    @classmethod
    def open(cls, path: Path | str, *, expect: Mapping[str, object] | None = None) -> "WindowFile":
        """Open a rank's window file, given as a path or URL, and check its manifest and size, but not the payload.

        Args:
            expect: fields of the window and the values that they must have, e.g. ``{"run_id": "a", "rank": 3}``.

        Raises:
            CheckpointError: the file is invalid, or a field differs from ``expect``. The message begins with the path.
        """
        parent, _, name = str(path).rpartition("/")
        backend = open_backend(parent or ".")
        return cls(backend.describe("", name), lambda: backend.open("", name), expect or {})


def _head(window: Window) -> bytes:
    content = window.to_bytes()
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"manifest of {len(content)} bytes: must have at most {MAX_MANIFEST_BYTES}")
    digest = xxhash.xxh3_128_digest(content)
    head = _HEADER.pack(MAGIC, WINDOW_FORMAT_VERSION, len(content), digest) + content
    return head + bytes(align(len(head)) - len(head))


def _chunks(head: bytes, window: Window, payload: Sequence[memoryview], where: str) -> Iterator[bytes | memoryview]:
    # All bytes of the file in order; each slice is checked before its first byte is returned.
    yield head
    position = 0
    for part, view in zip(window.slices, payload, strict=True):
        view = view.cast("B")
        # Memory can be damaged while a window waits: such bytes must not get a file that verifies.
        part.check_payload(view, where)
        yield from _zeros(part.offset - position)
        for start, stop, piece in part.extents():
            if piece is None:
                yield from _zeros(stop - start)
            else:
                yield view[start:stop]
        position = part.end


def _zeros(num_bytes: int) -> Iterator[bytes]:
    for start in range(0, num_bytes, len(_ZEROS)):
        yield _ZEROS[: num_bytes - start]


def _is_there(backend: Backend, directory: str, name: str, window: Window) -> bool:
    """Return whether this file exists already. Raises CheckpointError if a valid file has other content."""
    if not backend.exists(directory, name):
        return False
    where = backend.describe(directory, name)
    try:
        with WindowFile(where, lambda: backend.open(directory, name), {}) as opened:
            found = opened.verify()
    except CheckpointError:
        return False
    # Two histories captured the same window: replacing the file would mix them with other ranks' files.
    if found.to_bytes() != window.to_bytes():
        raise CheckpointError(f"{where}: already contains another {found.summary()}; move that file away first")
    return True


def _read_head(source: Source) -> tuple[Window, int]:
    """Return the window and the position of the payload's first byte, after the size of the file was checked."""
    size = source.num_bytes
    if size < _HEADER.size:
        raise CheckpointError(f"{size} bytes are too few for a window file")
    magic, version, length, digest = _HEADER.unpack(_read_bytes(source, 0, _HEADER.size))
    if magic != MAGIC:
        raise CheckpointError(f"magic {magic!r}: is not a window file of this project")
    check_version(version)
    # Checked before memory is allocated: the length is not covered by a checksum yet.
    if length > min(size - _HEADER.size, MAX_MANIFEST_BYTES):
        raise CheckpointError(f"manifest of {length} bytes in a file of only {size}")
    content = _read_bytes(source, _HEADER.size, length)
    if xxhash.xxh3_128_digest(content) != digest:
        raise CheckpointError("manifest does not match its checksum")
    window = Window.from_json(parse_object(content))
    if window.format_version != version:
        raise CheckpointError(
            f"format_version is {window.format_version} in the manifest and {version} in the header of the file"
        )
    return window, _payload_start(source, _HEADER.size + length, window.num_bytes)


def _payload_start(source: Source, end: int, payload_bytes: int) -> int:
    start = align(end)
    if source.num_bytes != start + payload_bytes:
        raise CheckpointError(f"has {source.num_bytes} bytes, but the manifest says {start + payload_bytes}")
    _check_zeros(memoryview(_read_bytes(source, end, start - end)), "before the payload")
    return start


def _read_bytes(source: Source, offset: int, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    source.read_into(offset, memoryview(content))
    return bytes(content)


def _check_expected(window: Window, expect: Mapping[str, object]) -> None:
    # A file that was renamed, or copied from another run, verifies by itself: only these fields show it.
    for name, value in expect.items():
        if (found := getattr(window, name)) != value:
            raise CheckpointError(f"{name}={found!r}: must be {value!r}")


def _check_zeros(view: memoryview, where: str) -> None:
    if bytes(view).count(0) != len(view):
        raise CheckpointError(f"{where}: damaged: padding is not zero")

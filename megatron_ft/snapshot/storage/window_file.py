"""File with one rank's part of a snapshot window. It is written completely or not at all, and verified before use.

::

    8 bytes    magic
    4          format version           (numbers are little endian)
    8          size of the manifest in bytes
    16         xxh3_128 of the manifest
    ...        manifest, strict JSON
    ...        zeros up to a multiple of 4096
    ...        payload: the slices, with zeros between pieces

A piece is one tensor's range of elements. The file of a window that leaves out experts may omit pieces that are in the
file of an earlier window. For each omitted piece, the header of the slice names this earlier window (``StoredIn``).
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import PIECE_ALIGNMENT_BYTES, WindowKey, align
from megatron_ft.snapshot.storage.backends import Backend, Source, open_backend
from megatron_ft.snapshot.storage.manifest import MAX_MANIFEST_BYTES, parse_object
from megatron_ft.snapshot.window import WINDOW_FORMAT_VERSION, Slice, Window, check_version

MAGIC = b"\x89MFTWIN\n"
_HEADER = struct.Struct("<8sIQ16s")
_CHUNK_BYTES = 4 << 20
_ZEROS = bytes(1 << 16)


def window_name(key: WindowKey) -> str:
    """Return the name of a window's directory: ``window_``, the start iteration, and the generation if not 0."""
    return f"window_{key.start_iteration:07d}" + (f".{key.generation}" if key.generation else "")


def rank_name(rank: int) -> str:
    """Return the name of a rank's window file."""
    return f"rank-{rank:05d}.window"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIn:
    """Table that maps each piece of a slice to the window whose file contains it: this window or an earlier window."""

    windows: tuple[WindowKey, ...]
    """Earlier windows whose files of the same rank contain pieces of the slice."""
    pieces: tuple[int, ...]
    """Index per piece: the window in ``windows`` whose file contains the piece, or -1 for the slice's own file."""

    @classmethod
    def of(cls, places: Sequence[WindowKey | None]) -> "StoredIn | None":
        """Create the table from ``places``, which has for each piece the earlier window whose file contains it, or
        None. Return None if no piece is in the file of an earlier window."""
        windows = tuple(sorted({key for key in places if key is not None}))
        if not windows:
            return None
        return cls(windows=windows, pieces=tuple(-1 if key is None else windows.index(key) for key in places))

    @classmethod
    def read(cls, window: Window) -> "StoredIn | None":
        """Read the table from the header of slice 0. Return None if no piece is in the file of an earlier window.

        Raises:
            CheckpointError: the entry in the header is invalid, or names a window that is not older than ``window``.
        """
        content = window.slices[0].header.get(_STORED_IN)
        if content is None:
            return None
        try:
            rows, indices = content["windows"], content["pieces"]
            keys = tuple(WindowKey(start_iteration=_natural(start), generation=_natural(made)) for start, made in rows)
            pieces = tuple(index if index == -1 else _natural(index) for index in indices)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{_STORED_IN}={str(content)[:80]}: must have valid windows and pieces") from None
        is_older = all(key.start_iteration < window.start_iteration for key in keys)
        fits = len(pieces) == len(window.slices[0].pieces) and max(pieces, default=-1) < len(keys)
        if window.num_slices != 1 or not keys or not is_older or not fits:
            raise CheckpointError(
                f"{_STORED_IN}: windows must be earlier ones, and pieces must have one entry per piece: an index into "
                "windows, or -1 for this file. The window must have one slice"
            )
        return cls(windows=keys, pieces=pieces)

    def layout(self, part: Slice) -> tuple[list[tuple[int, int]], int]:
        """Return (index, payload position) of each piece that the slice's own file contains, and the payload's size."""
        found, position = [], 0
        for index, piece in enumerate(part.pieces):
            if self.pieces[index] < 0:
                found.append((index, position))
                position = align(position + piece.num_bytes, PIECE_ALIGNMENT_BYTES)
        return found, align(position)

    def to_json(self) -> dict[str, Any]:
        return {"windows": [[key.start_iteration, key.generation] for key in self.windows], "pieces": list(self.pieces)}


_STORED_IN = "stored_in"


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} must be an integer of at least 0")
    return value


def write_window(
    folder: Path | str,
    window: Window,
    payload: Sequence[memoryview],
    *,
    places: Sequence[WindowKey | None] = (),
) -> int:
    """Write a rank's part of a window below ``folder``, a path or URL. When this returns, the file is on storage.

    Padding is written as zeros. If a valid file with the same content exists, it stays. If a damaged file exists, it is
    replaced.

    Args:
        payload: the bytes of each slice; slice i has ``window.slices[i].num_bytes`` bytes. Pieces that an earlier
            window's file contains are not read.
        places: only for a window with one slice. For each piece, the earlier window whose file contains the piece, or
            None to write the piece. Empty to write all pieces.

    Returns:
        Size of the file in bytes.

    Raises:
        CheckpointError: the storage fails, the payload does not match the window, or a valid file with other content
            exists. An existing file is then unchanged.
    """
    stored_in = StoredIn.of(places)
    if stored_in is not None:
        (part,) = window.slices
        header = {**part.header, _STORED_IN: stored_in.to_json()}
        window = replace(window, slices=[replace(part, header=header)])
    head = _head(window)
    sizes = [view.nbytes for view in payload]
    assert sizes == [part.num_bytes for part in window.slices], f"payload of {sizes} bytes does not match the slices"
    backend = open_backend(folder)
    directory, name = window_name(window.key), rank_name(window.rank)
    where = backend.describe(directory, name)
    try:
        # A restarted job may write a window again. An equal valid file stays, because other ranks may be reading it.
        if not _is_there(backend, directory, name, window):
            backend.write(directory, name, _chunks(head, window, payload, where, stored_in))
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be written: {error}") from error
    return len(head) + _payload_bytes(window, stored_in)


class WindowFile:
    """An open file with one rank's part of a window. Bytes are read on request, and verified before they are used."""

    def __init__(
        self,
        where: str,
        open_source: Callable[[], Source],
        expect: Mapping[str, object],
        open_earlier: "Callable[[WindowKey], WindowFile]",
    ) -> None:
        """Open the file at ``where``.

        Args:
            open_earlier: function that opens this rank's file of an earlier window, to read pieces from it.
        """
        self.path = where
        self._open_earlier = open_earlier
        self._source: Source | None = None
        try:
            self._source = open_source()
            self.window, self._payload_start, self._stored_in = _read_head(self._source)
            _check_expected(self.window, expect)
        except (OSError, CheckpointError) as error:
            # Close the file here, because after an error in the constructor no ``with`` block closes it.
            self.close()
            message = str(error)
            raise CheckpointError(message if message.startswith(where) else f"{where}: {message}") from error

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._payload_start + _payload_bytes(self.window, self._stored_in)

    @property
    def earlier(self) -> tuple[WindowKey, ...]:
        """Earlier windows whose files contain pieces that this file omits."""
        return () if self._stored_in is None else self._stored_in.windows

    def read_slice(self, index: int, into: memoryview | None = None) -> memoryview:
        """Read and verify slice ``index``. Return its bytes, in the buffer ``into`` if given, otherwise in new memory.

        Raises:
            CheckpointError: a piece is damaged, padding is not zero, or the storage fails. ``into`` may then contain
                unverified bytes.
        """
        part = self.window.slices[index]
        buffer = memoryview(bytearray(part.num_bytes)) if into is None else into.cast("B")
        assert buffer.nbytes == part.num_bytes, f"buffer of {buffer.nbytes} bytes for a slice of {part.num_bytes}"
        if self._stored_in is None:
            self._check(part, buffer)
        else:
            self._read_pieces(self._stored_in, part, buffer)
        return buffer

    def _read_pieces(self, stored_in: StoredIn, part: Slice, buffer: memoryview) -> None:
        # Reads each piece from the file that contains it, and compares the piece with the hash in this file's manifest.
        for start, stop, piece in part.extents():
            if piece is None:
                buffer[start:stop] = bytes(stop - start)
        self._read_own(part, {index: buffer[part.pieces[index].offset :] for index, _ in stored_in.layout(part)[0]})
        for number, key in enumerate(stored_in.windows):
            wanted = [index for index, place in enumerate(stored_in.pieces) if place == number]
            with self._open_earlier(key) as opened:
                (other,) = opened.window.slices[:1]
                if opened.window.num_slices != 1 or not all(part.has_same(index, other) for index in wanted):
                    raise CheckpointError(
                        f"{self.path}: omits pieces that must be in {opened.path}, but that file has different ones"
                    )
                opened._read_own(other, {index: buffer[part.pieces[index].offset :] for index in wanted})
        for index in range(len(part.pieces)):
            part.check_hash(index, part.hash_piece(index, buffer), self.path)

    def _read_own(self, part: Slice, targets: Mapping[int, memoryview]) -> None:
        # Reads pieces that are in this file. ``targets``: memory of at least the piece's size, by index of the piece.
        positions = {index: part.offset + piece.offset for index, piece in enumerate(part.pieces)}
        if self._stored_in is not None:
            positions = dict(self._stored_in.layout(part)[0])
        for index, target in targets.items():
            if index not in positions:
                raise CheckpointError(f"{self.path}: lacks piece {index}, which a later window expects in this file")
            size = part.pieces[index].num_bytes
            for _ in self._read(positions[index], positions[index] + size, target[:size]):
                pass

    def verify(self) -> Window:
        """Verify the whole payload and return the window. Raises the same errors as ``read_slice``."""
        if self._stored_in is not None:
            self.read_slice(0)
            self._check_gaps(self._stored_in)
            return self.window
        position = 0
        for part in self.window.slices:
            # Bytes between slices belong to no piece. Valid files have zeros there, so any other value is damage.
            for view in self._read(position, part.offset):
                _check_zeros(view, f"{self.path}: padding before the slice of iteration {part.iteration}")
            self._check(part, None)
            position = part.end
        return self.window

    def _check_gaps(self, stored_in: StoredIn) -> None:
        (part,), position = self.window.slices, 0
        found, size = stored_in.layout(part)
        for index, start in [*found, (-1, size)]:
            for view in self._read(position, start):
                _check_zeros(view, f"{self.path}: payload")
            position = start + (part.pieces[index].num_bytes if index >= 0 else 0)

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
        backend, folder = open_backend(parent or "."), parent.rpartition("/")[0]
        return cls(
            backend.describe("", name),
            lambda: backend.open("", name),
            expect or {},
            lambda key: cls.open(f"{folder or '.'}/{window_name(key)}/{name}"),
        )


def _head(window: Window) -> bytes:
    content = window.to_bytes()
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"manifest of {len(content)} bytes: must have at most {MAX_MANIFEST_BYTES}")
    digest = xxhash.xxh3_128_digest(content)
    head = _HEADER.pack(MAGIC, WINDOW_FORMAT_VERSION, len(content), digest) + content
    return head + bytes(align(len(head)) - len(head))


def _chunks(
    head: bytes, window: Window, payload: Sequence[memoryview], where: str, stored_in: StoredIn | None
) -> Iterator[bytes | memoryview]:
    # Yields all bytes of the file in order. Each slice is compared with its hashes before its first byte is yielded.
    yield head
    if stored_in is not None:
        (part,), (view,) = window.slices, payload
        view = view.cast("B")
        end = 0
        found, size = stored_in.layout(part)
        # Check only the pieces that are written: of the other pieces, memory may have a newer state.
        for index, _ in found:
            part.check_hash(index, part.hash_piece(index, view), where)
        for index, start in found:
            yield from _zeros(start - end)
            yield view[part.pieces[index].offset : part.pieces[index].end]
            end = start + part.pieces[index].num_bytes
        yield from _zeros(size - end)
        return
    position = 0
    for part, view in zip(window.slices, payload, strict=True):
        view = view.cast("B")
        # Memory may have been damaged since the hashes were computed. Damaged bytes must not be written.
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
    """Return whether file ``name`` is valid and has ``window``. Raises CheckpointError for another valid window."""
    if not backend.exists(directory, name):
        return False
    where = backend.describe(directory, name)
    try:
        with WindowFile(
            where,
            lambda: backend.open(directory, name),
            {},
            lambda key: WindowFile.open(backend.describe(window_name(key), name)),
        ) as opened:
            found = opened.verify()
    except CheckpointError:
        return False
    # The same iterations were captured twice with different results. If this file were replaced, it could be used
    # together with other ranks' files of the other capture.
    if found.to_bytes() != window.to_bytes():
        raise CheckpointError(f"{where}: already contains another {found.summary()}; move that file away first")
    return True


def _read_head(source: Source) -> tuple[Window, int, StoredIn | None]:
    """Read the part of the file before its payload, and check the file's size. Return the window's description, the
    position of the payload, and the table of pieces in earlier files."""
    size = source.num_bytes
    if size < _HEADER.size:
        raise CheckpointError(f"{size} bytes are too few for a window file")
    magic, version, length, digest = _HEADER.unpack(_read_bytes(source, 0, _HEADER.size))
    if magic != MAGIC:
        raise CheckpointError(f"begins with {magic!r}: is not a window file of this project")
    check_version(version)
    # Check the length before memory is allocated for it, because no checksum covers it.
    if length > min(size - _HEADER.size, MAX_MANIFEST_BYTES):
        raise CheckpointError(
            f"manifest of {length} bytes: must have at most {MAX_MANIFEST_BYTES}, and fit in the file of {size} bytes"
        )
    content = _read_bytes(source, _HEADER.size, length)
    if xxhash.xxh3_128_digest(content) != digest:
        raise CheckpointError("manifest does not match its checksum")
    window = Window.from_json(parse_object(content))
    if window.format_version != version:
        raise CheckpointError(
            f"format_version is {window.format_version} in the manifest and {version} in the header of the file"
        )
    stored_in = StoredIn.read(window)
    size_of_payload = _payload_bytes(window, stored_in)
    return window, _payload_start(source, _HEADER.size + length, size_of_payload), stored_in


def _payload_bytes(window: Window, stored_in: StoredIn | None) -> int:
    return window.num_bytes if stored_in is None else stored_in.layout(window.slices[0])[1]


def _payload_start(source: Source, end: int, payload_bytes: int) -> int:
    start = align(end)
    if source.num_bytes != start + payload_bytes:
        raise CheckpointError(f"has {source.num_bytes} bytes, but the manifest says {start + payload_bytes}")
    _check_zeros(memoryview(_read_bytes(source, end, start - end)), "padding before the payload")
    return start


def _read_bytes(source: Source, offset: int, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    source.read_into(offset, memoryview(content))
    return bytes(content)


def _check_expected(window: Window, expect: Mapping[str, object]) -> None:
    # The checksums of a file that was renamed, or copied from another run, are valid. Only these fields show the error.
    for name, value in expect.items():
        if (found := getattr(window, name)) != value:
            raise CheckpointError(f"{name}={found!r}: must be {value!r}")


def _check_zeros(view: memoryview, where: str) -> None:
    if bytes(view).count(0) != len(view):
        raise CheckpointError(f"{where}: damaged: padding is not zero")

"""Description of one rank's part of a snapshot window, as it is used in memory, in messages and in files.

A window has ``num_slices`` slices of consecutive iterations, which together contain every operator's full state once
(MoEvement, section 3.2). A slice consists of pieces. A piece is one component (such as the weight or a moment) of a
range of elements of one parameter. ``capture.py`` begins the description and adds the slices, the snapshot server adds
the hashes of the pieces, and ``window_file.py`` writes the description as the manifest of a file.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import xxhash

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import (
    GRADIENT_ITEM_BYTES,
    PIECE_ALIGNMENT_BYTES,
    SLICE_ALIGNMENT_BYTES,
    UPDATED_COMPONENTS,
    Piece,
    WindowKey,
    align,
)

WINDOW_FORMAT_VERSION = 2
"""Version of the format of windows. In version 1, ``run_id`` is the name of the run's folder. In version 2, ``run_id``
is the run's random id, and the header of slice 0 contains the run's settings."""
ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
}
"""Size in bytes of one value of each dtype, by the dtype's name in torch."""

# Status pages and memory maps use signed 64-bit integers. Larger values are refused as soon as they are read.
_MAX_INTEGER = 2**63 - 1
_NAMES = {
    "parameter": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,511}"),
    "component": re.compile(r"[a-z][a-z0-9_]{0,63}"),
}
_RUN_ID = re.compile(r"[^\x00-\x1f\x7f/]{1,255}")
_HASH = re.compile(r"[0-9a-f]{32}")
_SLICE_FIELDS = {"iteration": int, "offset": int, "num_bytes": int, "header": dict, "pieces": list}

AnyWindow = TypeVar("AnyWindow", bound="Window")


def _check_piece(piece: Piece) -> None:
    """Raise CheckpointError if the name, the range or the size of a piece is invalid."""
    problem = _piece_problem(piece)
    if problem is not None:
        raise CheckpointError(f"piece {piece.parameter!r:.80} {piece.component!r:.80}: {problem}")


def _piece_problem(piece: Piece) -> str | None:
    for name, pattern in _NAMES.items():
        value = getattr(piece, name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            return f"{name}={value!r:.80}: must match {pattern.pattern}"
    # These numbers may come from a peer or from a damaged file, and they are used as offsets into memory.
    for name in ("tensor_part", "start", "stop", "offset", "num_bytes"):
        value = getattr(piece, name)
        if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
            return f"{name}={value!r:.80}: must be an integer from 0 to 2**63 - 1"
    item = ITEM_BYTES.get(piece.dtype) if isinstance(piece.dtype, str) else None
    if item is None:
        return f"dtype={piece.dtype!r:.80}: must be one of {', '.join(ITEM_BYTES)}"
    if piece.stop < piece.start:
        return f"stop={piece.stop}: must be at least start={piece.start}"
    # Some components, such as Adam's step count, have one value for the whole range of elements.
    num_values = -(-(piece.stop - piece.start) // piece.elements_per_value)
    if piece.num_bytes not in (item, num_values * item):
        elements = f"elements, which are {piece.start} to {piece.stop}"
        if piece.elements_per_value > 1:
            elements = f"blocks of {piece.elements_per_value} {elements}"
        return f"num_bytes={piece.num_bytes}: must be {item} or {item} times the number of {elements}"
    return None


class Gradient(NamedTuple):
    """Gradient of the parameters of one piece of master weights, reduced over all ranks, unscaled and clipped."""

    piece: int
    """Index of the piece of master weights in the slice."""
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The AdamW update between two slices of consecutive iterations. If a peer has the first slice, it can compute the
    state of some parameters in the second slice from their gradients (MoEtion, section 5.2). The gradients (FP32) are
    in the memory of the window, after the second slice."""

    betas: tuple[float, float]
    eps: float
    gradients: tuple[Gradient, ...]
    """One gradient for each piece of master weights that the update changes."""

    def indices(self, part: "Slice") -> frozenset[int]:
        """Return the indices, in ``part``, of all pieces that the update changes."""
        return frozenset(index for pieces in self.pieces(part) for index in pieces.values())

    def pieces(self, part: "Slice") -> list[dict[str, int]]:
        """Return the pieces of ``part`` that each gradient updates, as {component: index of the piece}."""
        found: dict[tuple[str, int, int, int], dict[str, int]] = {}
        for index, piece in enumerate(part.pieces):
            if piece.component in UPDATED_COMPONENTS:
                place = (piece.parameter, piece.tensor_part, piece.start, piece.stop)
                found.setdefault(place, {})[piece.component] = index
        masters = (part.pieces[gradient.piece] for gradient in self.gradients)
        return [found[master.parameter, master.tensor_part, master.start, master.stop] for master in masters]

    def ranges(self, part: "Slice") -> list[tuple[int, int]]:
        """Return the range [first byte, byte after the last) of each gradient, counted from the end of ``part``."""
        found, position = [], 0
        for gradient in self.gradients:
            master = part.pieces[gradient.piece]
            end = position + GRADIENT_ITEM_BYTES * (master.stop - master.start)
            found.append((position, end))
            position = align(end, PIECE_ALIGNMENT_BYTES)
        return found

    def check(self, part: "Slice", window_bytes: int) -> None:
        """Check that the update can be applied to ``part``, a slice of a window with ``window_bytes`` bytes of memory.
        Raises CheckpointError."""
        masters = [gradient.piece for gradient in self.gradients]
        if sorted(set(masters)) != masters or not all(0 <= index < len(part.pieces) for index in masters):
            raise CheckpointError("update: gradients must have valid piece indices, in ascending order, each only once")
        for index in masters:
            piece = part.pieces[index]
            if piece.component != UPDATED_COMPONENTS[0] or not 0 < piece.num_bytes == 4 * (piece.stop - piece.start):
                raise CheckpointError(f"update: piece {index} must contain one FP32 master weight for each element")
        for pieces in self.pieces(part):
            if set(pieces) != set(UPDATED_COMPONENTS):
                raise CheckpointError(f"update: each parameter must have the pieces {', '.join(UPDATED_COMPONENTS)}")
            for name, index in pieces.items():
                piece = part.pieces[index]
                num_values = 1 if name == UPDATED_COMPONENTS[-1] else piece.stop - piece.start
                if piece.dtype != "float32" or piece.num_bytes != 4 * num_values or not part.is_captured(index):
                    raise CheckpointError(f"update: {name!r} of {piece.parameter!r} must be FP32 and captured now")
        end = max((stop for _, stop in self.ranges(part)), default=0)
        if part.end + end > window_bytes:
            after = f"after the slice, which ends at byte {part.end}"
            raise CheckpointError(
                f"update: gradients need {end} bytes {after}, but the window has {window_bytes} bytes"
            )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            "betas": list(self.betas),
            "eps": self.eps,
            "gradients": [list(gradient) for gradient in self.gradients],
        }

    @classmethod
    def from_json(cls, content: object) -> "Update":
        """Read the result of ``to_json``. Raises CheckpointError for anything else."""
        values = _check_object("update", content, {"betas": list, "eps": float, "gradients": list})
        numbers = [*values["betas"], values["eps"]]
        for row in values["gradients"]:
            if not isinstance(row, list) or len(row) != len(Gradient._fields) or type(row[0]) is not int:
                raise CheckpointError(f"update: gradient {row!r:.80}: must be a list of {', '.join(Gradient._fields)}")
            numbers += row[1:]
        if len(values["betas"]) != 2 or not all(type(number) is float and number >= 0 for number in numbers):
            raise CheckpointError("update: must have two betas, and all its numbers must be floats of at least 0")
        gradients = tuple(Gradient(*row) for row in values["gradients"])
        return cls(**{**values, "betas": tuple(values["betas"]), "gradients": gradients})


@dataclass(slots=True, kw_only=True)
class Slice:
    """Part of a window: the pieces of state that one rank captured after one iteration."""

    iteration: int
    """Last iteration whose update the captured state contains."""
    offset: int
    """Position of the slice's first byte in the window's memory."""
    num_bytes: int
    """Size of the slice in bytes, including padding between and after the pieces."""
    header: Mapping[str, Any]
    """Strict JSON: state that a replay needs besides piece data, e.g. the commit vote, the placement, step counts."""
    pieces: tuple[Piece, ...]
    """Pieces of the slice, in order of their offsets."""
    hashes: tuple[str, ...] | None = None
    """Hexadecimal xxh3_128 hash of each piece; None until the hashes are computed."""
    captured_at: tuple[int, ...] | None = None
    """Iteration after which each piece was captured; None if this is ``iteration`` for all pieces. In a window that
    leaves out experts, the pieces of these experts are copies from earlier windows."""
    update: Update | None = None
    """AdamW update by which peers compute pieces not sent to them; None if all captured ones are sent. Not in files."""

    @property
    def end(self) -> int:
        """Position of the byte after the slice in the window's memory."""
        return self.offset + self.num_bytes

    def extents(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield (first byte, byte after the last, index of the piece) of adjacent byte ranges that cover the slice. The
        index is None for a range of padding."""
        position = 0
        for index, piece in enumerate(self.pieces):
            # Padding counts as an extent: files have zeros there, so that damage to any of their bytes is found.
            if piece.offset > position:
                yield position, piece.offset, None
            yield piece.offset, piece.end, index
            position = piece.end
        if self.num_bytes > position:
            yield position, self.num_bytes, None

    def iteration_of(self, index: int) -> int:
        """Return the iteration after which piece ``index`` was captured."""
        return self.iteration if self.captured_at is None else self.captured_at[index]

    def is_captured(self, index: int) -> bool:
        """Return whether a piece was captured for this slice. Otherwise it was copied from an earlier window."""
        return self.iteration_of(index) == self.iteration

    @property
    def captured_bytes(self) -> int:
        """Number of bytes that were captured for this slice, without pieces copied from earlier windows."""
        if self.captured_at is None:
            return self.num_bytes
        return sum(piece.num_bytes for index, piece in enumerate(self.pieces) if self.is_captured(index))

    def captured(self, payload: memoryview, *, without: Collection[int] = ()) -> list[memoryview]:
        """Return the bytes of each piece that was captured for this slice. ``payload`` contains the slice's bytes.
        Pieces whose index is in ``without`` are left out."""
        return [
            payload[piece.offset : piece.end]
            for index, piece in enumerate(self.pieces)
            if index not in without and self.is_captured(index)
        ]

    def repeats(self, other: "Slice") -> bool:
        """Return whether ``update``, applied to slice ``other`` of the same generation, gives pieces of this slice."""
        if self.update is None or other.iteration != self.iteration - 1 or len(other.pieces) != len(self.pieces):
            return False
        indices = self.update.indices(self)
        return all(other.pieces[index] == self.pieces[index] and other.is_captured(index) for index in indices)

    def has_same(self, index: int, other: "Slice") -> bool:
        """Return whether both slices have the same bytes of piece ``index``, at the same offset in the slice. Both must
        be of one generation."""
        if index >= len(other.pieces) or other.pieces[index] != self.pieces[index]:
            return False
        return self.iteration_of(index) == other.iteration_of(index)

    def hash_piece(self, index: int, payload: memoryview) -> str:
        """Compute the hash of piece ``index``. ``payload`` contains the bytes of the slice."""
        piece = self.pieces[index]
        return xxhash.xxh3_128_hexdigest(payload[piece.offset : piece.end])

    def hash_pieces(self, payload: memoryview, known: Mapping[int, str] | None = None) -> tuple[str, ...]:
        """Return the hash of each piece. ``payload`` contains the bytes of the slice. ``known`` contains hashes that
        need not be computed, by index of the piece."""
        hashes = known or {}
        return tuple(hashes.get(index) or self.hash_piece(index, payload) for index in range(len(self.pieces)))

    def check_payload(self, payload: memoryview, where: str) -> None:
        """Verify the hash of every piece in ``payload``. An error (CheckpointError) names ``where`` and the piece."""
        payload = payload.cast("B")
        if payload.nbytes != self.num_bytes:
            raise CheckpointError(f"{where}: slice of {payload.nbytes} bytes, but its manifest says {self.num_bytes}")
        for index, found in enumerate(self.hash_pieces(payload)):
            self.check_hash(index, found, where)

    def check_hash(self, index: int, found: str, where: str) -> None:
        """Check that piece ``index`` has hash ``found``. An error (CheckpointError) names ``where`` and the piece."""
        assert self.hashes is not None, f"{where}: hashes are not computed yet"
        piece, expected = self.pieces[index], self.hashes[index]
        if found != expected:
            elements = f"elements {piece.start} to {piece.stop}, iteration {self.iteration}"
            raise CheckpointError(
                f"{where}: damaged: {piece.component!r} of {piece.parameter!r}, {elements}: "
                f"checksum {found}, but its manifest says {expected}"
            )

    def validate(self) -> None:
        """Raise CheckpointError if pieces are not in order, exceed the slice, or contain an element twice."""
        where = f"slice of iteration {self.iteration!r:.80}"
        for name in ("iteration", "offset", "num_bytes"):
            _check_integer(f"{where}: {name}", getattr(self, name))
        position = 0
        for piece in self.pieces:
            _check_piece(piece)
            what = f"{where}: piece {piece.parameter!r} {piece.component!r} at offset {piece.offset}"
            if piece.offset < position:
                raise CheckpointError(f"{what}: must begin after the previous piece, which ends at {position}")
            if piece.end > self.num_bytes:
                raise CheckpointError(f"{what}: ends at {piece.end}, beyond the slice of {self.num_bytes} bytes")
            position = piece.end
        # If two pieces contained the same element, the loaded state would depend on their order. Empty ranges overlap
        # nothing, so the check also finds two equal ranges.
        found = sorted((p.parameter, p.tensor_part, p.component, p.start, p.stop) for p in self.pieces)
        for one, other in pairwise(found):
            if one[:3] == other[:3] and (other[3] < one[4] or one[3:] == other[3:]):
                raise CheckpointError(f"{where}: element {other[3]} of {one[0]!r} {one[2]!r} is captured twice")
        for digest in self.hashes or ():
            _check_pattern(f"{where}: xxh3_128", digest, _HASH)
        for iteration in self.captured_at or ():
            _check_integer(f"{where}: captured_at", iteration)
        if self.captured_at is not None and len(self.captured_at) != len(self.pieces):
            raise CheckpointError(
                f"{where}: captured_at has {len(self.captured_at)} entries: must have {len(self.pieces)}, one per piece"
            )
        if max(self.captured_at or (0,)) > self.iteration:
            raise CheckpointError(f"{where}: captured_at={max(self.captured_at or ())}: exceeds the slice's iteration")

    def to_json(self) -> dict[str, Any]:
        """Convert the slice to JSON values. A piece becomes a list, which ends with its hash if hashes are known."""
        rows: Any = self.pieces
        if self.hashes is not None:
            rows = [[*piece, digest] for piece, digest in zip(self.pieces, self.hashes, strict=True)]
        about: dict[str, Any] = {"iteration": self.iteration, "offset": self.offset, "num_bytes": self.num_bytes}
        if self.captured_at is not None:
            about["captured_at"] = list(self.captured_at)
        return {**about, "header": self.header, "pieces": rows}

    @classmethod
    def from_json(cls, content: object, *, hashed: bool) -> "Slice":
        """Read the result of ``to_json``, with hashes if ``hashed``. Raises CheckpointError for anything else."""
        types = _SLICE_FIELDS
        # Only slices that leave out experts have this field.
        if isinstance(content, dict) and "captured_at" in content:
            types = {**types, "captured_at": list}
        values = _check_object("slice", content, types)
        if "captured_at" in values:
            values["captured_at"] = tuple(values["captured_at"])
        rows, length = values.pop("pieces"), len(Piece._fields) + hashed
        for row in rows:
            if not isinstance(row, list) or len(row) != length:
                names = ", ".join([*Piece._fields, *["xxh3_128"] * hashed])
                raise CheckpointError(f"piece {row!r:.80}: must be a list of {names}")
        pieces = tuple(Piece(*row[: len(Piece._fields)]) for row in rows)
        found = cls(**values, pieces=pieces, hashes=tuple(row[-1] for row in rows) if hashed else None)
        found.validate()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLevel:
    """Describes the file of a window that has one slice and leaves out experts. The file has older states of some
    experts than the window in memory (MoC-System, section 5.1). All ranks choose these experts together."""

    captured_at: tuple[int, ...]
    """Iteration after which each piece in the file was captured. The piece in memory may be of a later iteration."""
    header: Mapping[str, str]
    """Header entries (JSON texts by name) that the file has in place of the slice's entries with the same names."""
    is_whole: bool = False
    """Whether the file contains all pieces itself. If False, pieces in an earlier file are not written again."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        whole = {"is_whole": True} if self.is_whole else {}
        return {"captured_at": list(self.captured_at), "header": dict(self.header), **whole}

    @classmethod
    def from_json(cls, content: object) -> "StoredLevel":
        """Read the result of ``to_json``. Raises CheckpointError for anything else."""
        if isinstance(content, dict):
            content = {"is_whole": False, **content}
        values = _check_object("stored", content, {"captured_at": list, "header": dict, "is_whole": bool})
        for iteration in values["captured_at"]:
            _check_integer("stored.captured_at", iteration)
        for name, text in values["header"].items():
            if type(text) is not str:
                raise CheckpointError(f"stored.header: {name}={text!r:.80}: must be a JSON text")
        return cls(**{**values, "captured_at": tuple(values["captured_at"])})


@dataclass(kw_only=True)
class Origin:
    """Origin of one part of a window: the rank that captured it, and the rank's run, generation and parallel layout."""

    run_id: str
    """Random id of the run. In format version 1, it is the name of the run's folder."""
    generation: int
    """Number of the membership (generation) whose ranks captured the window."""
    topology: Mapping[str, int]
    """Sizes of the job's parallel groups, by name."""
    rank: int
    world_size: int
    """Number of ranks of the job. A complete window has one part per rank."""

    def validate(self) -> None:
        """Raise CheckpointError if the value of a field is invalid."""
        _check_pattern("run_id", self.run_id, _RUN_ID)
        for name in ("generation", "rank", "world_size"):
            _check_integer(name, getattr(self, name))
        if not self.rank < self.world_size:
            raise CheckpointError(f"rank={self.rank}: must be less than world_size={self.world_size}")
        for name, size in self.topology.items():
            _check_integer(f"topology.{name}", size)


@dataclass(kw_only=True)
class Window(Origin):
    """One rank's part of a window: descriptions of its slices and of the pieces in them."""

    start_iteration: int
    """Iteration after which the first slice was captured."""
    num_slices: int
    """Number of slices of the complete window."""
    plan: Mapping[str, Any]
    """Plan by which the window was captured (``WindowPlan``), as JSON values."""
    slices: list[Slice] = field(default_factory=list)
    """Slices that were captured so far. Slice i contains state after iteration ``start_iteration + i``."""
    format_version: int = WINDOW_FORMAT_VERSION

    @property
    def key(self) -> WindowKey:
        """Key that identifies the window. It is equal for the parts of all ranks."""
        return WindowKey(start_iteration=self.start_iteration, generation=self.generation)

    @property
    def last_iteration(self) -> int:
        """Iteration after which the last slice is captured."""
        return self.start_iteration + self.num_slices - 1

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the slices captured so far, including padding."""
        return self.slices[-1].end if self.slices else 0

    @property
    def captured(self) -> bool:
        """Whether all slices are captured."""
        return len(self.slices) == self.num_slices

    @property
    def leaves_out_experts(self) -> bool:
        """Whether some experts were not captured. The window then has copies of their pieces from earlier windows."""
        return any(iteration != part.iteration for part in self.slices for iteration in part.captured_at or ())

    @property
    def num_hashed(self) -> int:
        """Number of slices for which the hashes of the pieces are known."""
        return sum(part.hashes is not None for part in self.slices)

    @property
    def complete(self) -> bool:
        """Whether all slices are captured and their hashes are known."""
        return self.num_hashed == self.num_slices

    def validate(self) -> None:
        """Raise CheckpointError if a field or a slice is invalid."""
        check_version(self.format_version)
        super().validate()
        for name in ("start_iteration", "num_slices"):
            _check_integer(name, getattr(self, name))
        if not max(1, len(self.slices)) <= self.num_slices:
            raise CheckpointError(
                f"num_slices={self.num_slices}: must be at least 1, and at least {len(self.slices)} (slices present)"
            )
        position = 0
        for index, part in enumerate(self.slices):
            part.validate()
            self._check_position(index, part, position)
            position = part.end

    def check_next(self, index: int, part: Slice, window_bytes: int) -> None:
        """Check that the slice ``part`` can be added to the window as slice ``index``.

        Args:
            window_bytes: size of the window's buffer.

        Raises:
            CheckpointError: ``part`` is not the next slice, or its position is wrong.
        """
        if self.captured:
            raise CheckpointError(f"slice {index}: must not be added; the window has all its {self.num_slices} slices")
        if index != len(self.slices):
            raise CheckpointError(f"slice {index}: must be slice {len(self.slices)}, the next slice of the window")
        self._check_position(index, part, self.num_bytes)
        if part.end > window_bytes:
            raise CheckpointError(f"slice {index}: ends at byte {part.end}: the buffer has only {window_bytes} bytes")

    def _check_position(self, index: int, part: Slice, position: int) -> None:
        if part.iteration != self.start_iteration + index:
            raise CheckpointError(f"slice {index}: iteration={part.iteration}: must be {self.start_iteration + index}")
        if part.offset != align(position):
            next_multiple = f"the next multiple of {SLICE_ALIGNMENT_BYTES}"
            raise CheckpointError(f"slice {index}: offset={part.offset}: must be {align(position)}, {next_multiple}")

    def summary(self) -> str:
        """Describe the window in one line."""
        return (
            f"window of iterations {self.start_iteration} to {self.last_iteration}, "
            f"rank {self.rank} of {self.world_size}, {sum(len(part.pieces) for part in self.slices)} pieces, "
            f"{self.num_bytes} bytes, run {self.run_id}, generation {self.generation}"
        )

    def describe(self) -> dict[str, Any]:
        """Convert the window to JSON values, without the slices."""
        return {**{entry.name: getattr(self, entry.name) for entry in fields(Window)}, "slices": []}

    def to_json(self) -> dict[str, Any]:
        """Convert the window to JSON values, including the slices captured so far."""
        return {**self.describe(), "slices": [part.to_json() for part in self.slices]}

    @classmethod
    def from_json(cls: type[AnyWindow], content: object, *, whole: bool = True) -> AnyWindow:
        """Create a window from JSON values. Raises CheckpointError if they are invalid or of a newer format.

        Args:
            whole: true for the result of ``to_json`` with all slices and hashes; false for values without slices.
        """
        # Check the version first. Otherwise the error for a newer format would only name unknown fields.
        if isinstance(content, Mapping):
            check_version(content.get("format_version"))
        values = _check_object("window", content, _WINDOW_FIELDS)
        slices = [Slice.from_json(part, hashed=True) for part in values["slices"]]
        window = cls(**{**values, "slices": slices})
        window.validate()
        if len(slices) != (expected := window.num_slices if whole else 0):
            raise CheckpointError(f"num_slices={window.num_slices}: expected {expected} slices, got {len(slices)}")
        # Plan and headers may contain any JSON values. Refuse values here that could not be written to storage later.
        _dump({"plan": window.plan, "headers": [part.header for part in slices]})
        return window

    def to_bytes(self) -> bytes:
        """Convert a complete window to its manifest: the bytes of canonical JSON, which are equal for equal windows.

        Raises:
            CheckpointError: the window is invalid, so the bytes could not be read back.
        """
        self.validate()
        assert self.complete, f"slices or hashes are missing: {self.summary()}"
        return _dump(self.to_json())


_WINDOW_FIELDS: dict[str, type] = {
    **dict.fromkeys(("generation", "rank", "world_size", "start_iteration", "num_slices", "format_version"), int),
    "run_id": str,
    "topology": dict,
    "plan": dict,
    "slices": list,
}


def check_version(version: object) -> None:
    """Raise CheckpointError if this code cannot read format ``version``."""
    if type(version) is not int or not 1 <= version <= WINDOW_FORMAT_VERSION:
        raise CheckpointError(
            f"window format_version={version!r:.80}: must be from 1 to {WINDOW_FORMAT_VERSION}; to read a newer "
            "format, install a newer version of this project"
        )


def _check_object(where: str, content: object, types: Mapping[str, type]) -> dict[str, Any]:
    """Return a copy of ``content``, a JSON object. Raises CheckpointError if its fields are not exactly ``types``."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: must be an object")
    if content.keys() != types.keys():
        odd = sorted(str(name)[:80] for name in content.keys() ^ types.keys())
        raise CheckpointError(f"{where}: has missing or unknown fields: {', '.join(odd[:5])}")
    for name, kind in types.items():
        if type(content[name]) is not kind:
            raise CheckpointError(f"{where}: {name}={content[name]!r:.80}: must be {kind.__name__}")
    return dict(content)


def _check_integer(where: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        raise CheckpointError(f"{where}={value!r:.80}: must be an integer from 0 to 2**63 - 1")


def _check_pattern(where: str, value: object, pattern: re.Pattern[str]) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise CheckpointError(f"{where}={value!r:.80}: must match {pattern.pattern}")


def _dump(content: Mapping[str, Any]) -> bytes:
    try:
        # Equal windows must have equal bytes: rejected windows are recognized by a digest of these bytes, and
        # ``write_window`` keeps a file with equal bytes.
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the plan or a header is not strict JSON: {error}") from None

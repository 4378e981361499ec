"""What a window's file of one rank holds: slices, their pieces, and where each byte of them lies."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage.manifest import parse_object

WINDOW_FORMAT_VERSION = 2
"""1: ``run_id`` is the name of the run's folder. 2: it is the run's random name, and slice 0 tells its settings."""
WINDOW_ALIGNMENT_BYTES = 4096
"""Slices, and the payload in its file, begin at multiples of it."""
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
"""Bytes of one value of each dtype, by torch's names."""

_MAX_INTEGER = 2**63 - 1
_PARAMETER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,511}")
_COMPONENT = re.compile(r"[a-z][a-z0-9_]{0,63}")
_RUN_ID = re.compile(r"[^\x00-\x1f\x7f/]{1,255}")
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRecord:
    """One component of one parameter's element range, as it was in one state."""

    parameter: str
    """Global name."""
    tensor_part: int
    """Which tensor-parallel part of the parameter."""
    component: str
    """``weight``, ``master``, ``exp_avg``..."""
    dtype: str
    """torch's name of it."""
    start: int
    """First element, in the flattened part."""
    stop: int
    """Element after the last."""
    offset: int
    """First byte, from the start of the slice."""
    num_bytes: int
    """A value for each element, or one value for all of them."""
    xxh3_128: str
    """Hexadecimal checksum of the bytes."""

    @property
    def end(self) -> int:
        """Byte after the last, from the start of the slice."""
        return self.offset + self.num_bytes

    def validate(self) -> None:
        """Raises CheckpointError when a name, range, size or checksum cannot be one of ours."""
        where = f"piece {self.parameter!r} {self.component!r}"
        check_pattern(f"{where}: parameter", self.parameter, _PARAMETER)
        check_pattern(f"{where}: component", self.component, _COMPONENT)
        check_pattern(f"{where}: xxh3_128", self.xxh3_128, _HASH)
        for name in ("tensor_part", "start", "stop", "offset", "num_bytes"):
            check_integer(f"{where}: {name}", getattr(self, name))
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{where}: dtype={self.dtype!r}: must be one of {', '.join(ITEM_BYTES)}")
        if self.stop < self.start:
            raise CheckpointError(f"{where}: stop={self.stop}: must be at least start={self.start}")
        item = ITEM_BYTES[self.dtype]
        if self.num_bytes not in (item, (self.stop - self.start) * item):
            raise CheckpointError(
                f"{where}: num_bytes={self.num_bytes}: must be {item} or {item} for each of the elements "
                f"{self.start} to {self.stop}"
            )

    def to_json(self) -> list[str | int]:
        """A row of values in the order of the fields."""
        return [getattr(self, name) for name in _PIECE_FIELDS]

    @classmethod
    def from_json(cls, content: object) -> "PieceRecord":
        """Inverse of ``to_json``. Raises CheckpointError for anything else."""
        if not isinstance(content, list) or len(content) != len(_PIECE_FIELDS):
            raise CheckpointError(f"piece {str(content)[:80]}: must be a list of {', '.join(_PIECE_FIELDS)}")
        values = dict(zip(_PIECE_FIELDS, content, strict=True))
        for name in _PIECE_FIELDS:
            check_type(f"piece: {name}", values[name], _PIECE_TYPES[name])
        record = cls(**values)
        record.validate()
        return record


_PIECE_FIELDS = tuple(entry.name for entry in fields(PieceRecord))
_PIECE_TYPES = {entry.name: entry.type for entry in fields(PieceRecord)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRecord:
    """What was captured of one state."""

    iteration: int
    """Iterations whose updates the state holds."""
    offset: int
    """First byte, from the start of the payload."""
    num_bytes: int
    """Bytes, those between and after the pieces included."""
    header: dict[str, Any]
    """What replay needs beside tensors: the vote, histories, counters. Strict JSON."""
    pieces: tuple[PieceRecord, ...]
    """In order of offset."""

    @property
    def end(self) -> int:
        """Byte after the last, from the start of the payload."""
        return self.offset + self.num_bytes

    def extents(self) -> Iterator[tuple[int, int, PieceRecord | None]]:
        """(first byte, byte after the last, piece or None for padding) of every byte of the slice, in order."""
        position = 0
        for piece in self.pieces:
            if piece.offset > position:
                yield position, piece.offset, None
            yield piece.offset, piece.end, piece
            position = piece.end
        if self.num_bytes > position:
            yield position, self.num_bytes, None

    def validate(self) -> None:
        """Raises CheckpointError for pieces outside the slice, overlapping, out of order, or captured twice."""
        where = f"slice of iteration {self.iteration}"
        for name in ("iteration", "offset", "num_bytes"):
            check_integer(f"{where}: {name}", getattr(self, name))
        position = 0
        for piece in self.pieces:
            piece.validate()
            what = f"{where}: piece {piece.parameter!r} {piece.component!r} at offset {piece.offset}"
            if piece.offset < position:
                raise CheckpointError(f"{what}: overlaps the piece that ends at {position}, or is out of order")
            if piece.end > self.num_bytes:
                raise CheckpointError(f"{what}: ends at {piece.end}, outside the slice of {self.num_bytes} bytes")
            position = piece.end
        self._check_elements(where)

    def _check_elements(self, where: str) -> None:
        found = sorted((p.parameter, p.tensor_part, p.component, p.start, p.stop) for p in self.pieces)
        for one, other in pairwise(found):
            if one[:3] == other[:3] and (other[3] < one[4] or one[3:] == other[3:]):
                raise CheckpointError(f"{where}: element {other[3]} of {one[0]!r} {one[2]!r} is there twice")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "iteration": self.iteration,
            "offset": self.offset,
            "num_bytes": self.num_bytes,
            "header": self.header,
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    @classmethod
    def from_json(cls, content: object) -> "SliceRecord":
        """Inverse of ``to_json``. Raises CheckpointError for anything else."""
        types = {"iteration": int, "offset": int, "num_bytes": int, "header": dict, "pieces": list}
        values = check_object("slice", content, types)
        pieces = tuple(PieceRecord.from_json(piece) for piece in values["pieces"])
        record = cls(**{**values, "pieces": pieces})
        record.validate()
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowManifest:
    """One rank's part of a window (MoEvement, section 3.2): which states it spans and what lies where."""

    run_id: str
    """Random name of the run that captured it; in format 1 the name of its folder."""
    generation: int
    """Membership the ranks had agreed on."""
    topology: dict[str, int]
    """Parallel sizes of the job."""
    rank: int
    """Whose part it is."""
    world_size: int
    """Ranks of the job; the window is complete with a file of each."""
    start_iteration: int
    """Iteration of the first slice."""
    num_slices: int
    """Consecutive states it spans."""
    plan: dict[str, Any]
    """The window's plan, as JSON."""
    slices: tuple[SliceRecord, ...]
    """Slice i is of the state after iteration ``start_iteration + i``."""
    format_version: int = field(default=WINDOW_FORMAT_VERSION)
    """Version of this layout."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all slices."""
        return self.slices[-1].end if self.slices else 0

    def validate(self) -> None:
        """Raises CheckpointError when any field cannot be one of ours."""
        check_version(self.format_version)
        check_pattern("run_id", self.run_id, _RUN_ID)
        for name in ("generation", "rank", "world_size", "start_iteration", "num_slices"):
            check_integer(name, getattr(self, name))
        if not self.rank < self.world_size:
            raise CheckpointError(f"rank={self.rank}: must be less than world_size={self.world_size}")
        for name, size in self.topology.items():
            check_integer(f"topology.{name}", size)
        if self.num_slices < 1 or self.num_slices != len(self.slices):
            raise CheckpointError(f"num_slices={self.num_slices}: must be at least 1; there are {len(self.slices)}")
        self._check_slices()
        _dump({"plan": self.plan, "headers": [record.header for record in self.slices]})

    def _check_slices(self) -> None:
        position = 0
        for index, record in enumerate(self.slices):
            record.validate()
            if record.iteration != self.start_iteration + index:
                raise CheckpointError(f"slice {index} is of iteration {record.iteration}: must be consecutive")
            if record.offset != align(position):
                raise CheckpointError(f"slice {index}: offset={record.offset}: must be {align(position)}")
            position = record.end

    def summary(self) -> str:
        """One line for a log."""
        return (
            f"window of iterations {self.start_iteration} to {self.start_iteration + self.num_slices - 1}, "
            f"rank {self.rank} of {self.world_size}, {sum(len(record.pieces) for record in self.slices)} pieces, "
            f"{self.payload_bytes} bytes, run {self.run_id}, generation {self.generation}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "slices": [record.to_json() for record in self.slices]}

    @classmethod
    def from_json(cls, content: object) -> "WindowManifest":
        """Inverse of ``to_json``. Raises CheckpointError for anything else, a newer format included."""
        if isinstance(content, Mapping):
            check_version(content.get("format_version"))
        values = check_object("window", content, _MANIFEST_TYPES)
        for name, size in values["topology"].items():
            check_type(f"topology.{name}", size, int)
        slices = tuple(SliceRecord.from_json(record) for record in values["slices"])
        manifest = cls(**{**values, "slices": slices})
        manifest.validate()
        return manifest

    def to_bytes(self) -> bytes:
        """As the file holds it. Raises CheckpointError unless it is valid."""
        self.validate()
        return _dump(self.to_json())

    @classmethod
    def from_bytes(cls, content: bytes) -> "WindowManifest":
        """Raises CheckpointError on anything :meth:`to_bytes` would not have written."""
        return cls.from_json(parse_object(content))


_MANIFEST_TYPES: dict[str, type] = {
    **dict.fromkeys(("generation", "rank", "world_size", "start_iteration", "num_slices", "format_version"), int),
    "run_id": str,
    "topology": dict,
    "plan": dict,
    "slices": list,
}


def align(num_bytes: int) -> int:
    """The next multiple of :data:`WINDOW_ALIGNMENT_BYTES`."""
    return -(-num_bytes // WINDOW_ALIGNMENT_BYTES) * WINDOW_ALIGNMENT_BYTES


def check_version(version: object) -> None:
    """Raises CheckpointError for a version this code does not read."""
    if type(version) is not int or not 1 <= version <= WINDOW_FORMAT_VERSION:
        raise CheckpointError(
            f"window format_version={version!r}: this version reads 1 to {WINDOW_FORMAT_VERSION}; "
            "a newer one needs a newer version of this project"
        )


def check_type(where: str, value: object, kind: object) -> None:
    """Raises CheckpointError unless ``value`` is exactly of type ``kind``."""
    if type(value) is not kind:
        raise CheckpointError(f"{where}={str(value)[:80]!r}: must be {getattr(kind, '__name__', kind)}")


def check_object(where: str, content: object, types: Mapping[str, type]) -> dict[str, Any]:
    """``content`` as an object with exactly these fields. Raises CheckpointError otherwise."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: must be an object")
    if content.keys() != types.keys():
        odd = sorted(str(name)[:80] for name in content.keys() ^ types.keys())
        raise CheckpointError(f"{where}: fields missing or unknown: {', '.join(odd[:5])}")
    for name, kind in types.items():
        check_type(f"{where}: {name}", content[name], kind)
    return content


def check_integer(where: str, value: int) -> None:
    """Raises CheckpointError unless ``value`` is from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        raise CheckpointError(f"{where}={str(value)[:80]}: must be an integer from 0 to 2**63 - 1")


def check_pattern(where: str, value: str, pattern: re.Pattern[str]) -> None:
    """Raises CheckpointError unless all of ``value`` matches ``pattern``."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise CheckpointError(f"{where}={str(value)[:80]!r}: must match {pattern.pattern}")


def _dump(content: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"plan or header is not strict JSON: {error}") from None

"""Reads recorded expert loads (numbers of tokens per expert) from files in several formats.

The content is checked strictly, because wrong loads would lead to a bad placement of experts.
"""

import csv
import io
import itertools
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npformat

from megatron_ft.errors import DataError
from megatron_ft.serde import parse_json, read_bytes, reading

SUFFIXES = (".json", ".npz", ".npy", ".csv")
CSV_FIELDS = ("batch_id", "stage", "router_layer_index", "expert_id", "assigned_tokens", "total_tokens")
STAGES = ("encoder", "decoder")
MAX_BYTES = 1 << 30
"""Largest accepted size in bytes of a file, and of an unpacked array in it, checked before memory is allocated."""
MAX_EXPERTS = 1 << 16
"""Largest accepted number of experts of a layer."""
MAX_LOADS = 1 << 26
"""Largest accepted product of the number of layers and the number of experts, in a file of expert ids."""

Tokens = npt.NDArray[np.float64] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """Recorded numbers of tokens per expert, for one or several iterations."""

    source: str
    """Name of the file with the loads, for error messages."""
    iterations: tuple[int, ...]
    """Iteration of each record, ascending."""
    tokens: Tokens
    """Tokens per expert, ``[records, ranks, layers, microbatches, experts]``. If the file contains only sums over ranks
    or over microbatches, this dimension has size 1. Integers, or floats if the file contains fractions."""

    @property
    def num_records(self) -> int:
        """Number of records in the file: one for each iteration or batch."""
        return int(self.tokens.shape[0])

    @property
    def num_ranks(self) -> int:
        """Number of ranks; 1 if the file contains sums over ranks."""
        return int(self.tokens.shape[1])

    @property
    def num_layers(self) -> int:
        """Number of layers, including dense layers, whose loads are 0."""
        return int(self.tokens.shape[2])

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer."""
        return int(self.tokens.shape[4])

    def per_layer(self, record: int | None = None) -> Tokens:
        """Return the loads ``[layers, experts]`` of one record, or of all records, summed over all other dimensions."""
        chosen = self.tokens if record is None else self.tokens[record : record + 1]
        result: Tokens = chosen.sum(axis=(0, 1, 3))
        return result

    def record_of(self, iteration: int) -> int:
        """Return the index of the record for ``iteration``.

        Raises:
            DataError: the file has no record for ``iteration``.
        """
        if iteration not in self.iterations:
            recorded = f"the {self.num_records} recorded ones, {self.iterations[0]} to {self.iterations[-1]}"
            raise DataError(f"{self.source}: iteration={iteration}: must be one of {recorded}")
        return self.iterations.index(iteration)

    @classmethod
    def read(cls, path: Path) -> "ExpertLoads":
        """Read recorded loads. The suffix of the file determines its format.

        * ``.json``: a list of per-layer lists of tokens, or ``{"logical_count": [[...], ...]}``.
        * ``.npz``: arrays ``counts`` (iterations, ranks, layers, microbatches, experts) and ``iters``.
        * ``.npy``: expert ids (tokens, layers, topk).
        * ``.csv``: a row per batch, stage, layer and expert with ``assigned_tokens``.

        Raises:
            DataError: the file is missing or damaged, or a load is negative or not finite.
        """
        readers = {".json": _json, ".npz": _npz, ".npy": _npy, ".csv": _csv}
        reader = readers.get(path.suffix)
        if reader is None:
            raise DataError(f"{path}: unknown suffix {path.suffix!r}: must be one of {', '.join(SUFFIXES)}")
        content = read_bytes(path, max_bytes=MAX_BYTES)
        with reading(path):
            iterations, tokens = reader(path.name, content)
            return cls(source=path.name, iterations=iterations, tokens=_checked(path.name, iterations, tokens))


def _checked(name: str, iterations: tuple[int, ...], tokens: Tokens) -> Tokens:
    if tokens.ndim != 5 or 0 in tokens.shape:
        raise DataError(
            f"{name}: shape {tokens.shape}: must be (records, ranks, layers, microbatches, experts), all above 0"
        )
    if len(iterations) != tokens.shape[0]:
        raise DataError(f"{name}: has {len(iterations)} iterations: must have {tokens.shape[0]}, one for each record")
    if any(later <= earlier for earlier, later in itertools.pairwise(iterations)):
        raise DataError(f"{name}: iterations must be ascending")
    wrong = np.argwhere(~np.isfinite(tokens) | (tokens < 0))
    if len(wrong):
        record, _, layer, _, expert = (int(position) for position in wrong[0])
        value = tokens[tuple(wrong[0])]
        where = f"record {record}, layer {layer}, expert {expert}"
        raise DataError(f"{name}: load of {where} is {value}: must be a finite number of at least 0")
    # Larger floats do not fit ``int64``: the conversion would wrap around without an error.
    if (tokens == np.floor(tokens)).all() and tokens.max() < 2**62:
        return tokens.astype(np.int64)
    return tokens


def _json(name: str, content: bytes) -> tuple[tuple[int, ...], Tokens]:
    try:
        document = parse_json(content)
    except ValueError as error:
        raise DataError(f"{name}: is not JSON: {error}") from error
    layers = document.get("logical_count") if isinstance(document, dict) else document
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, list) for layer in layers):
        raise DataError(f'{name}: must be a list of loads per layer, as [[1, 2], [3, 4]], or {{"logical_count": list}}')
    for number, layer in enumerate(layers):
        if len(layer) != len(layers[0]) or not layer:
            raise DataError(f"{name}: layer {number} has {len(layer)} loads: must have at least 1, as many as layer 0")
        for expert, load in enumerate(layer):
            if isinstance(load, bool) or not isinstance(load, (int, float)):
                raise DataError(f"{name}: load of layer {number}, expert {expert} is {load!r}: must be a number")
    return (0,), np.asarray(layers, dtype=np.float64)[None, None, :, None, :]


def _npz(name: str, content: bytes) -> tuple[tuple[int, ...], Tokens]:
    try:
        # A pickle in an array runs code when it is loaded.
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            missing = {"counts", "iters"} - set(archive.files)
            if missing:
                raise DataError(f"{name}: must contain the array {sorted(missing)[0]!r}")
            _check_members(name, content)
            counts, iterations = archive["counts"], archive["iters"]
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{name}: is not a readable npz archive: {error}") from error
    if iterations.ndim != 1:
        raise DataError(f"{name}: array iters must have one dimension, but has {iterations.ndim}")
    return tuple(int(value) for value in iterations), _numbers(name, counts)


def _check_members(name: str, content: bytes) -> None:
    # A small archive can contain huge arrays, so sizes are checked before any array is unpacked.
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            if member.filename in ("counts.npy", "iters.npy"):
                if member.file_size > MAX_BYTES:
                    raise DataError(f"{name}: {member.filename}: {member.file_size} bytes: must be at most {MAX_BYTES}")
                with archive.open(member) as file:
                    _check_array(f"{name}: {member.filename}", file, member.file_size)


def _check_array(name: str, file: IO[bytes], num_bytes: int) -> None:
    # The header decides how much memory numpy allocates, so it is compared with the actual size first.
    version = npformat.read_magic(file)
    read_header = npformat.read_array_header_1_0 if version == (1, 0) else npformat.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        raise DataError(f"{name}: is not a readable npy array: it contains Python objects")
    said, there = math.prod(shape) * dtype.itemsize, num_bytes - file.tell()
    if min(shape, default=0) < 0 or said != there:
        raise DataError(f"{name}: shape {shape} of {dtype} needs {said} bytes, but the file has {there}")


def _npy(name: str, content: bytes) -> tuple[tuple[int, ...], Tokens]:
    try:
        _check_array(name, io.BytesIO(content), len(content))
        ids = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{name}: is not a readable npy array: {error}") from error
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise DataError(f"{name}: {ids.dtype} of shape {ids.shape}: must be integers of shape (tokens, layers, topk)")
    if ids.min() < 0:
        raise DataError(f"{name}: expert id {ids.min()}: must be at least 0")
    # ``bincount`` allocates memory for the largest id, so one flipped bit could cost gigabytes.
    num_experts = int(ids.max()) + 1
    if num_experts > MAX_EXPERTS:
        raise DataError(f"{name}: expert id {ids.max()}: must be below {MAX_EXPERTS}")
    if num_experts * ids.shape[1] > MAX_LOADS:
        raise DataError(f"{name}: {ids.shape[1]} layers times {num_experts} experts: must be at most {MAX_LOADS}")
    layers = [np.bincount(ids[:, layer].ravel(), minlength=num_experts) for layer in range(ids.shape[1])]
    return (0,), np.stack(layers)[None, None, :, None, :]


def _csv(name: str, content: bytes) -> tuple[tuple[int, ...], Tokens]:
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8"))))
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: is not UTF-8: {error}") from error
    loads: dict[tuple[int, int, int, int], int] = {}
    for line, row in enumerate(rows, start=2):
        key, tokens = _csv_row(name, line, row)
        if key in loads:
            raise DataError(f"{name}, line {line}: has the same batch, stage, layer and expert as an earlier line")
        loads[key] = tokens
    return _csv_table(name, loads)


def _csv_row(name: str, line: int, row: dict[str, Any]) -> tuple[tuple[int, int, int, int], int]:
    missing = [field for field in CSV_FIELDS if not row.get(field)]
    if missing:
        raise DataError(f"{name}, line {line}: has no value for {missing[0]}")
    if row["stage"] not in STAGES:
        raise DataError(f"{name}, line {line}: stage={row['stage']}: must be one of {', '.join(STAGES)}")
    try:
        batch, layer, expert, tokens = (
            int(row[field]) for field in ("batch_id", "router_layer_index", "expert_id", "assigned_tokens")
        )
    except ValueError as error:
        raise DataError(f"{name}, line {line}: {error}") from error
    if tokens < 0:
        raise DataError(f"{name}, line {line}: assigned_tokens={tokens}: must be at least 0")
    return (batch, STAGES.index(row["stage"]), layer, expert), tokens


def _csv_table(name: str, loads: dict[tuple[int, int, int, int], int]) -> tuple[tuple[int, ...], Tokens]:
    # Make the array: records are batches; layers are those of the encoder, then those of the decoder.
    batches = _distinct([key[:1] for key in loads])
    layers = _distinct([key[1:3] for key in loads])
    experts = _distinct([key[3:] for key in loads])
    # Few rows can have very many combinations of keys, so their number is checked before the table is allocated.
    expected = len(batches) * len(layers) * len(experts)
    if len(loads) != expected:
        raise DataError(
            f"{name}: has {len(loads)} rows: must have {expected}, one for each combination of batch, layer and expert"
        )
    tokens = np.zeros((len(batches), 1, len(layers), 1, len(experts)), dtype=np.int64)
    for (batch, stage, layer, expert), count in loads.items():
        tokens[batches[(batch,)], 0, layers[(stage, layer)], 0, experts[(expert,)]] = count
    return tuple(batch for (batch,) in batches), tokens


def _distinct(keys: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    return {key: position for position, key in enumerate(sorted(set(keys)))}


def _numbers(name: str, array: npt.NDArray[Any]) -> Tokens:
    if not (np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)):
        raise DataError(f"{name}: loads are of type {array.dtype}: must be numbers")
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64)
    return array.astype(np.float64)

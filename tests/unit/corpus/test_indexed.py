"""Tests the writer and the strict reader of the indexed dataset."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.corpus import indexed
from megatron_ft.corpus.indexed import HEADER, IndexedWriter, IndexInfo, bin_path, idx_path
from megatron_ft.errors import DataError
from tests.helpers.disk import note_steps

UINT16 = np.dtype("<u2")


def write(prefix: Path, documents: list[list[int]], dtype: np.dtype = UINT16) -> Path:
    with IndexedWriter(prefix, dtype, overwrite=True) as writer:
        for document in documents:
            writer.add_document(np.asarray(document, dtype=np.int64))
    return prefix


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    dtype=st.sampled_from(["<u2", "<i4", "u1", "<i8"]),
    chunk=st.integers(1, 5),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dtype: str, chunk: int) -> None:
    prefix = tmp_path_factory.mktemp("data") / "set"
    documents = [list(range(length)) for length in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "CHUNK", chunk)
        info = IndexInfo.read(write(prefix, documents, np.dtype(dtype)))
    assert (info.num_tokens, info.num_documents, info.num_sequences) == (sum(lengths), len(lengths), len(lengths))
    assert info.dtype == np.dtype(dtype)
    assert np.fromfile(bin_path(prefix), dtype=dtype).tolist() == [token for part in documents for token in part]


def test_only_the_two_files_remain(tmp_path: Path) -> None:
    write(tmp_path / "set", [[1, 2], [3]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


def test_an_exception_leaves_the_old_files_alone(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[1, 2]])
    before = bin_path(prefix).read_bytes()
    with pytest.raises(RuntimeError), IndexedWriter(prefix, UINT16, overwrite=True) as writer:
        writer.add_document(np.asarray([7]))
        raise RuntimeError
    assert bin_path(prefix).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


def test_index_is_renamed_last_and_after_its_bytes_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = note_steps(monkeypatch)
    write(tmp_path / "set", [[1]])
    folder = f"fsync {tmp_path.name}"
    assert steps == ["fsync set.bin", "fsync set.idx", folder, "rename set.bin", folder, "rename set.idx", folder]


def test_writer_refusals(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without tokens"):
        write(tmp_path / "set", [])
    with pytest.raises(DataError, match="document of 0 tokens"):
        write(tmp_path / "set", [[]])
    with pytest.raises(DataError, match="70000: must fit into uint16"):
        write(tmp_path / "set", [[70000]])
    write(tmp_path / "set", [[1]])
    with pytest.raises(DataError, match="already exists"):
        IndexedWriter(tmp_path / "set", UINT16)


def head(prefix: Path, **changes: object) -> None:
    """Overwrite fields of the header in place."""
    fields = dict(zip(("magic", "version", "code", "sequences", "entries"), _unpack(prefix), strict=True)) | changes
    patch_bytes(idx_path(prefix), 0, HEADER.pack(*fields.values()))


def _unpack(prefix: Path) -> tuple[object, ...]:
    return HEADER.unpack(idx_path(prefix).read_bytes()[: HEADER.size])


def patch_bytes(path: Path, offset: int, new: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(new)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


LENGTHS, POINTERS, ENTRIES = HEADER.size, HEADER.size + 8, HEADER.size + 24
DAMAGE = {
    "no idx": (lambda p: idx_path(p).unlink(), r"set\.idx: no such file"),
    "no bin": (lambda p: bin_path(p).unlink(), r"set\.bin: no such file"),
    "empty idx": (lambda p: truncate(idx_path(p), 0), r"bytes=0: must be at least 34"),
    "cut header": (lambda p: truncate(idx_path(p), 20), r"bytes=20: must be at least"),
    "cut idx": (lambda p: truncate(idx_path(p), 81), r"bytes=81: must be 82"),
    "longer idx": (lambda p: truncate(idx_path(p), 84), r"bytes=84: must be 82"),
    "cut bin": (lambda p: truncate(bin_path(p), 9), r"set\.bin: bytes=9: must be 10"),
    "longer bin": (lambda p: truncate(bin_path(p), 12), r"set\.bin: bytes=12: must be 10"),
    "magic": (lambda p: head(p, magic=b"TNTIDX\x00\x00\x00"), r"magic=.*TNTIDX"),
    "version": (lambda p: head(p, version=2), r"version=2: must be 1"),
    "float code": (lambda p: head(p, code=7), r"dtype code=7: must be an integer format"),
    "unknown code": (lambda p: head(p, code=99), r"dtype code=99"),
    "huge count": (lambda p: head(p, sequences=2**63), r"bytes=82: must be \d{15,}"),
    "no entries": (lambda p: head(p, sequences=4, entries=0), r"document entries=0|bytes=82"),
    "negative length": (lambda p: patch_bytes(idx_path(p), LENGTHS, struct.pack("<i", -1)), r"sequence 0=-1"),
    "pointer": (lambda p: patch_bytes(idx_path(p), POINTERS + 8, struct.pack("<q", 2)), r"sequence 1=2: must be 4"),
    "first entry": (
        lambda p: patch_bytes(idx_path(p), ENTRIES, struct.pack("<q", 1)),
        r"document entry 0=1: must be 0",
    ),
    "falling": (lambda p: patch_bytes(idx_path(p), ENTRIES + 8, struct.pack("<q", -3)), r"document entry 1=-3"),
    "last entry": (lambda p: patch_bytes(idx_path(p), ENTRIES + 16, struct.pack("<q", 1)), r"last document entry=1"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    prefix = write(tmp_path / "set", [[1, 2], [3, 4, 5]])
    damage, message = DAMAGE[name]
    damage(prefix)
    with pytest.raises(DataError, match=message):
        IndexInfo.read(prefix)


def test_no_tokens_at_all(tmp_path: Path) -> None:
    prefix = tmp_path / "set"
    idx_path(prefix).write_bytes(HEADER.pack(indexed.MAGIC, 1, 8, 0, 1) + struct.pack("<q", 0))
    bin_path(prefix).write_bytes(b"")
    with pytest.raises(DataError, match="tokens=0: must be at least 1"):
        IndexInfo.read(prefix)


def test_a_suffix_is_pointed_out(tmp_path: Path) -> None:
    write(tmp_path / "set", [[1]])
    with pytest.raises(DataError, match="without .bin or .idx"):
        IndexInfo.read(tmp_path / "set.bin")


@settings(max_examples=60, deadline=None)
@given(offset=st.integers(0, 81), value=st.integers(0, 255))
def test_any_changed_index_byte_is_refused(tmp_path_factory: pytest.TempPathFactory, offset: int, value: int) -> None:
    prefix = write(tmp_path_factory.mktemp("data") / "set", [[1, 2], [3, 4, 5]])
    content = idx_path(prefix).read_bytes()
    patch_bytes(idx_path(prefix), offset, bytes([value]))
    if idx_path(prefix).read_bytes() == content or (offset == 17 and value == 3):  # int16 is as wide as uint16
        assert IndexInfo.read(prefix).num_tokens == 5
    elif ENTRIES + 8 <= offset < ENTRIES + 16:
        _may_only_move_a_document_border(prefix)
    else:
        with pytest.raises(DataError):
            IndexInfo.read(prefix)


def _may_only_move_a_document_border(prefix: Path) -> None:
    try:
        assert IndexInfo.read(prefix).num_tokens == 5
    except DataError as error:
        assert "document entry" in str(error)

"""Tests values that are copied from file to file: their places in checkpoints, and the verification of new files."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.convert.dense_files import DenseReader, WeightsWriter
from megatron_ft.mcore.convert.streams import Span, StoredValues, VerifiedFiles, chunks_of
from megatron_ft.snapshot.storage.files import CHUNK_BYTES, FileEntry, HashedFile

WHOLE = torch.arange(60, dtype=torch.float32).reshape(6, 10)


def checkpoint(folder: Path, parts: list[tuple[tuple[int, int], torch.Tensor]]) -> DenseReader:
    """Write each part, with its position in ``WHOLE``, to a file of its own, as ranks do."""
    chunks, places = [], {}
    for number, (offsets, part) in enumerate(parts):
        content = io.BytesIO()
        torch.save(part, content)
        (folder / f"{number}.distcp").write_bytes(b"before" + content.getvalue() + b"after")
        chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=part.shape))
        place = _StorageInfo(f"{number}.distcp", 6, len(content.getvalue()))
        places[MetadataIndex("w", torch.Size(offsets))] = place
    entry = TensorStorageMetadata(properties=TensorProperties(dtype=WHOLE.dtype), size=WHOLE.shape, chunks=chunks)
    metadata = Metadata(state_dict_metadata={"w": entry}, storage_data=places)
    return DenseReader(directory=folder, manifest=None, metadata=metadata)


LAYOUTS = {
    "one part": ([((0, 0), WHOLE)], True),
    "rows, in another order": ([((4, 0), WHOLE[4:].clone()), ((0, 0), WHOLE[:4].clone())], True),
    "columns": ([((0, 0), WHOLE[:, :3].clone()), ((0, 3), WHOLE[:, 3:].clone())], False),
    "a view, saved with all values": ([((0, 0), WHOLE[:2]), ((2, 0), WHOLE[2:].clone())], False),
    "a transposed tensor": ([((0, 0), WHOLE.t().contiguous().t())], False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_follow_one_another_are_not_loaded(name: str, tmp_path: Path) -> None:
    parts, is_stored = LAYOUTS[name]
    reader = checkpoint(tmp_path, parts)
    values = reader.values("w")
    assert isinstance(values, StoredValues) == is_stored
    assert torch.equal(reader.read("w"), WHOLE)
    assert b"".join(bytes(chunk) for chunk in chunks_of(values)) == WHOLE.numpy().tobytes()
    if isinstance(values, StoredValues):
        for num_rows in (1, 4, 5, 6):
            assert torch.equal(values.first_rows(num_rows).load(), WHOLE[:num_rows])


def test_missing_rows_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="have 20 elements, but the tensor has 60"):
        checkpoint(tmp_path, [((0, 0), WHOLE[:2].clone())]).read("w")
    twice = [((0, 0), WHOLE[:3].clone()), ((2, 0), WHOLE[2:5].clone())]
    assert isinstance(checkpoint(tmp_path, twice).values("w"), torch.Tensor), "the rows do not follow one another"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3, 2), (CHUNK_BYTES, 3)])
def test_tensors_are_written_as_torch_writes_them(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    writer = WeightsWriter(directory=tmp_path, most_file_bytes=1)
    writer.write([("w", tensor)])
    (file,) = writer.files
    content, reference = (tmp_path / file.entry.name).read_bytes(), io.BytesIO()
    torch.save(tensor, reference)
    found = torch.load(io.BytesIO(content), weights_only=True)
    assert found.dtype == dtype and torch.equal(found, tensor)
    wanted = reference.getvalue()
    assert len(content) == len(wanted) == file.tensors[0].num_bytes
    end = content.index(b"PK", 640 + tensor.nbytes)
    assert content[:end] == wanted[:end], "only checksums of the values may differ"
    different = [at for at in range(end, len(wanted)) if content[at] != wanted[at]]
    assert len(different) <= 40, "two checksums of the values, the id that torch derives from them, and its checksums"


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(bytes(100))
    values = StoredValues(
        dtype=torch.uint8, shape=(100,), spans=tuple(Span(path=path, offset=at, num_bytes=50) for at in (0, 50))
    )
    assert values.load().shape == (100,)
    path.write_bytes(bytes(90))
    with pytest.raises(CheckpointError, match="ends 10 bytes before the end of a tensor"):
        values.load()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        values.load()


def test_files_get_their_names_after_they_were_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completed: list[FileEntry] = []
    commit = HashedFile.commit

    def damaged(self: HashedFile) -> FileEntry:
        entry = commit(self)
        content = bytearray(self.path.read_bytes())
        content[-1] ^= 1
        self.path.write_bytes(content)
        return entry

    def write(files: VerifiedFiles, name: str) -> None:
        with files.new(name) as file:
            file.write(b"content of " + name.encode())

    with VerifiedFiles(tmp_path, completed.append) as files:
        write(files, "one")
        write(files, "two")
    assert [entry.name for entry in completed] == ["one", "two"]
    with (
        monkeypatch.context() as patch,
        pytest.raises(CheckpointError, match="three: does not contain what was written"),
    ):
        patch.setattr(HashedFile, "commit", damaged)
        with VerifiedFiles(tmp_path, completed.append) as files:
            write(files, "three")
    assert [entry.name for entry in completed] == ["one", "two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_an_error_keeps_the_file_before(tmp_path: Path) -> None:
    completed: list[Any] = []

    def fail(files: VerifiedFiles) -> None:
        with files.new("one") as file:
            file.write(b"1")
        with files.new("two") as file:
            file.write(b"2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), VerifiedFiles(tmp_path, completed.append) as files:
        fail(files)
    assert [path.name for path in tmp_path.iterdir()] == ["one"] and len(completed) == 1

"""Tests files of windows that lack pieces, because the file of an earlier window has them."""

import json
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import fsspec  # type: ignore[import-untyped]
import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import MAX_PARTIAL_FILES, Piece, WindowKey, align
from megatron_ft.snapshot.server.windows import HeldWindow, OnStorage
from megatron_ft.snapshot.storage import window_file
from megatron_ft.snapshot.storage.window_file import WindowFile, rank_name, window_name, write_window
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Slice
from megatron_ft.testing.stored_samples import forge

SIZES = (40, 36, 4, 5000, 64)
"""Bytes of the pieces; they begin at multiples of 64."""
NUM_BYTES = 8192
WORLD_SIZE = 2


@pytest.fixture(params=["path", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """Return a folder that does not exist yet, in each kind of storage."""
    yield tmp_path / "windows" if request.param == "path" else f"memory://{uuid4().hex}/windows"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


class Job:
    """Writes windows of one rank, each with the state after its iteration, as the snapshot server does."""

    def __init__(self, folder: Path | str, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self.on_storage: OnStorage | None = None
        self.written: list[int] = []
        """Bytes of each file."""

    def state(self, iteration: int, index: int) -> bytes:
        return random.Random(f"{self.rank} {iteration} {index}").randbytes(SIZES[index])

    def payload(self, captured_at: tuple[int, ...]) -> bytes:
        content, offset = bytearray(NUM_BYTES), 0
        for index, iteration in enumerate(captured_at):
            content[offset : offset + SIZES[index]] = self.state(iteration, index)
            offset += -(-SIZES[index] // 64) * 64
        return bytes(content)

    def window(self, iteration: int, captured_at: tuple[int, ...] | None) -> HeldWindow:
        pieces, offset = [], 0
        for index, size in enumerate(SIZES):
            pieces.append(Piece(f"w{index}", 0, "master", "uint8", 0, size, offset, size))
            offset += -(-size // 64) * 64
        part = Slice(
            iteration=iteration, offset=0, num_bytes=NUM_BYTES, header={}, pieces=tuple(pieces), captured_at=captured_at
        )
        part.hashes = part.hash_pieces(memoryview(self.payload(captured_at or (iteration,) * len(SIZES))))
        return HeldWindow(
            run_id="run-1",
            generation=0,
            topology={},
            rank=self.rank,
            world_size=WORLD_SIZE,
            start_iteration=iteration,
            num_slices=1,
            plan={},
            slices=[part],
            buffer=0,
        )

    def write(self, iteration: int, captured_at: tuple[int, ...] | None = None) -> HeldWindow:
        window = self.window(iteration, captured_at)
        places = [] if self.on_storage is None else self.on_storage.places_of(window)
        payload = memoryview(self.payload(captured_at or (iteration,) * len(SIZES)))
        self.written.append(write_window(self.folder, window, [payload], places=places))
        self.on_storage = OnStorage.after(self.on_storage, window, places)
        return window

    def read(self, iteration: int) -> bytes:
        with WindowFolder(self.folder).open(key(iteration), self.rank) as opened:
            opened.verify()
            return bytes(opened.read_slice(0))


def key(iteration: int) -> WindowKey:
    return WindowKey(start_iteration=iteration, generation=0)


HISTORY = {10: None, 11: (10, 11, 11, 10, 11), 12: (12, 11, 12, 10, 12), 13: (12, 13, 13, 10, 13)}


def write_history(folder: Path | str, rank: int = 0) -> Job:
    job = Job(folder, rank)
    for iteration, captured_at in HISTORY.items():
        job.write(iteration, captured_at)
    return job


def test_every_window_can_be_read_although_each_byte_is_written_once(folder: Path | str) -> None:
    job = write_history(folder)
    for iteration, captured_at in HISTORY.items():
        assert job.read(iteration) == job.payload(captured_at or (iteration,) * len(SIZES))
        path = f"{folder}/{window_name(key(iteration))}/{rank_name(0)}"
        with WindowFile.open(path) as opened:  # without the folder: the files beside it are found
            assert bytes(opened.read_slice(0)) == job.payload(captured_at or (iteration,) * len(SIZES))
            assert opened.num_bytes == job.written[list(HISTORY).index(iteration)]
    with WindowFolder(folder).open(key(13), 0) as opened:
        assert opened.earlier == (key(10), key(12))
        assert opened.window.slices[0].captured_at == HISTORY[13]


def test_padding_is_zero_in_given_memory_and_in_the_file(tmp_path: Path) -> None:
    job = write_history(tmp_path)
    with WindowFolder(tmp_path).open(key(12), 0) as opened:
        target = memoryview(bytearray(b"\xee" * NUM_BYTES))
        opened.read_slice(0, target)
    assert bytes(target) == job.payload((12, 11, 12, 10, 12))
    path = tmp_path / window_name(key(12)) / rank_name(0)
    content = bytearray(path.read_bytes())
    content[-1] = 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="padding is not zero"):
        job.read(12)


@pytest.mark.parametrize("iteration", [10, 12, 13])
def test_damage_is_found_in_each_of_its_files(tmp_path: Path, iteration: int) -> None:
    job = write_history(tmp_path)
    path = tmp_path / window_name(key(iteration)) / rank_name(0)
    content = bytearray(path.read_bytes())
    start = next(index for index in range(len(content)) if content[index:].startswith(job.state(iteration, 4)))
    content[start] ^= 1
    path.write_bytes(content)
    if iteration == 10:  # its last piece is in no later window
        assert job.read(13) == job.payload((12, 13, 13, 10, 13))
        place = next(index for index in range(len(content)) if content[index:].startswith(job.state(10, 3)))
        content[place] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: 'master' of 'w[34]'" if iteration != 12 else "."):
        job.read(13 if iteration != 12 else 12)


def test_a_missing_earlier_file_is_named(tmp_path: Path) -> None:
    job = write_history(tmp_path)
    (tmp_path / window_name(key(10)) / rank_name(0)).unlink()
    with pytest.raises(CheckpointError, match="window_0000010"):
        job.read(13)
    assert WindowFolder(tmp_path).newest(1)[0] is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"windows": [[14, 0]], "pieces": [0, -1, -1, -1, -1]}, "windows must be earlier ones"),
        ({"windows": [[10, 0]], "pieces": [0, -1, -1, -1]}, "windows must be earlier ones"),
        ({"windows": [[10, 0]], "pieces": [1, -1, -1, -1, -1]}, "windows must be earlier ones"),
        ({"windows": [[10, 0]], "pieces": [-2, -1, -1, -1, -1]}, "must have valid windows and pieces"),
        ({"windows": [[10]], "pieces": [0, -1, -1, -1, -1]}, "must have valid windows and pieces"),
        ({"windows": [[True, 0]], "pieces": [0, -1, -1, -1, -1]}, "must have valid windows and pieces"),
        ({"windows": 7, "pieces": []}, "must have valid windows and pieces"),
        ({}, "must have valid windows and pieces"),
        ({"windows": [[11, 0]], "pieces": [-1, -1, -1, 0, -1]}, "omits pieces that must be in|lacks piece|bytes"),
    ],
)
def test_records_that_no_writer_makes_are_refused(tmp_path: Path, record: object, message: str) -> None:
    write_history(tmp_path)
    path = tmp_path / window_name(key(13)) / rank_name(0)

    content = path.read_bytes()
    length = struct.unpack_from("<Q", content, 12)[0]
    manifest = json.loads(content[36 : 36 + length])
    manifest["slices"][0]["header"]["stored_in"] = record
    path.write_bytes(forge(json.dumps(manifest).encode(), content[align(36 + length) :]))
    with pytest.raises(CheckpointError, match=message), WindowFile.open(path) as opened:
        opened.verify()


def test_an_earlier_file_with_another_state_is_refused(tmp_path: Path) -> None:
    job = write_history(tmp_path)
    path = tmp_path / window_name(key(10)) / rank_name(0)
    path.unlink()
    other = Job(tmp_path, 0)
    other.state = lambda iteration, index: b"x" * SIZES[index]  # type: ignore[method-assign]
    other.write(10)
    with pytest.raises(CheckpointError, match="damaged"):
        job.read(13)


def test_windows_with_needed_pieces_are_not_deleted(folder: Path | str) -> None:
    jobs = [write_history(folder, rank) for rank in range(WORLD_SIZE)]
    windows = WindowFolder(folder)
    assert windows.retain(1, WORLD_SIZE) == [key(11)]
    assert windows.list_windows() == [key(10), key(12), key(13)]
    for job in jobs:
        assert job.read(13) == job.payload((12, 13, 13, 10, 13))
        job.write(14)
    assert windows.retain(1, WORLD_SIZE) == [key(10), key(12), key(13)], "a file with all pieces needs no other"


def test_a_file_with_all_pieces_is_written_now_and_then(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(10)
    for iteration in range(11, 30):
        job.write(iteration, (10, iteration, iteration, 10, iteration))
    whole = [number for number, size in enumerate(job.written) if size == max(job.written)]
    assert whole == [number for number in range(20) if not _earlier(tmp_path, 10 + number)]
    assert whole == [0, MAX_PARTIAL_FILES + 1, 2 * (MAX_PARTIAL_FILES + 1)]


def _earlier(folder: Path, iteration: int) -> tuple[WindowKey, ...]:
    with WindowFolder(folder).open(key(iteration), 0) as opened:
        return opened.earlier


def test_nothing_is_left_out_after_another_generation_or_layout() -> None:
    job = Job(Path("unused"))
    first = job.window(10, None)
    on_storage = OnStorage.after(None, first, [])
    assert on_storage is not None and on_storage.places == (key(10),) * len(SIZES)
    second = job.window(11, (10, 11, 11, 10, 11))
    assert on_storage.places_of(second) == [key(10), None, None, key(10), None]
    second.generation = 1
    assert on_storage.places_of(second) == []
    second.generation = 0
    second.slices[0].pieces = second.slices[0].pieces[:-1]
    assert on_storage.places_of(second) == []
    assert OnStorage.after(on_storage, replace_slices(second), []) is None


def replace_slices(window: HeldWindow) -> HeldWindow:
    return replace(window, num_slices=2)


def test_reading_in_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_file, "_CHUNK_BYTES", 7)
    job = write_history(tmp_path)
    assert job.read(13) == job.payload((12, 13, 13, 10, 13))

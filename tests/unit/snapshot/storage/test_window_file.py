"""Tests the file of a window: it is read with the written bytes, or not at all."""

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.storage import files, window_file
from megatron_ft.snapshot.storage.backends import open_backend
from megatron_ft.snapshot.storage.window_file import WindowFile, rank_name, window_name, write_window
from megatron_ft.testing.stored_samples import forge, sample_window
from tests.helpers import window_fixture


def views(payload: tuple[bytes, ...]) -> list[memoryview]:
    """Return the payload in the form that ``write_window`` accepts."""
    return [memoryview(content) for content in payload]


@pytest.fixture(params=["path", "file", "memory", "local"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """Return a folder that does not exist yet, in each kind of storage."""
    if request.param == "memory":
        name = f"memory://{uuid4().hex}/windows"
        yield name
        fsspec.filesystem("memory").store.clear()
    else:
        yield tmp_path / "windows" if request.param == "path" else f"{request.param}://{tmp_path}/windows"


def path_in(folder: Path | str, start_iteration: int = 20, rank: int = 1, generation: int = 0) -> str:
    """Return the path of a rank's file."""
    return (
        f"{folder}/{window_name(WindowKey(start_iteration=start_iteration, generation=generation))}/{rank_name(rank)}"
    )


def test_round_trip(folder: Path | str) -> None:
    window, payload = sample_window(20, 1)
    num_bytes = write_window(folder, window, views(payload))
    with WindowFile.open(path_in(folder), expect={"run_id": "run-1", "rank": 1}) as opened:
        assert opened.verify() == window
        assert opened.num_bytes == num_bytes
        assert [bytes(opened.read_slice(index)) for index in range(2)] == list(payload)
        target = memoryview(bytearray(len(payload[1])))
        opened.read_slice(1, target)
        assert bytes(target) == payload[1]


def test_pieces_longer_than_a_chunk_are_read_in_several(folder: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_file, "_CHUNK_BYTES", 7)
    window, payload = sample_window(20, 1)
    assert any(stop - start > 7 and (stop - start) % 7 for part in window.slices for start, stop, _ in part.extents())
    write_window(folder, window, views(payload))
    with WindowFile.open(path_in(folder)) as opened:
        assert opened.verify() == window
        assert [bytes(opened.read_slice(index)) for index in range(2)] == list(payload)


def test_padding_is_zero_whatever_the_buffers_hold(folder: Path | str) -> None:
    window, payload = sample_window(20, 1)
    dirty = [bytearray(b"\xee" * len(content)) for content in payload]
    for record, content, buffer in zip(window.slices, payload, dirty, strict=True):
        for piece in record.pieces:
            buffer[piece.offset : piece.end] = content[piece.offset : piece.end]
    write_window(folder, window, [memoryview(buffer) for buffer in dirty])
    with WindowFile.open(path_in(folder)) as opened:
        assert bytes(opened.read_slice(0)) == payload[0]
        opened.verify()


def test_a_damaged_buffer_is_not_written(folder: Path | str) -> None:
    window, payload = sample_window(20, 1)
    damaged = bytearray(payload[1])
    damaged[window.slices[1].pieces[2].offset] ^= 1
    with pytest.raises(CheckpointError, match="'exp_avg' of 'decoder.layers.0.mlp.router.weight'.*iteration 21"):
        write_window(folder, window, [memoryview(payload[0]), memoryview(damaged)])
    with pytest.raises(CheckpointError, match="(?i)no such file|window_0000020"):
        WindowFile.open(path_in(folder))
    if not str(folder).startswith("memory"):
        assert not list(Path(str(folder).rpartition("://")[2]).rglob("*.*"))


def test_another_sound_file_is_never_replaced(folder: Path | str) -> None:
    window, payload = sample_window(20, 1)
    write_window(folder, window, views(payload))
    write_window(folder, window, views(payload))
    with pytest.raises(CheckpointError, match="move that file away first"):
        write_window(folder, replace(window, plan={}), views(payload))
    write_window(folder, replace(window, plan={}, generation=1), views(payload))
    with WindowFile.open(path_in(folder)) as first, WindowFile.open(path_in(folder, generation=1)) as second:
        assert first.verify() == window
        assert second.verify().generation == 1


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    window, payload = sample_window(20, 1)
    write_window(tmp_path, window, views(payload))
    path = Path(path_in(tmp_path))
    path.write_bytes(path.read_bytes()[:-1])
    write_window(tmp_path, window, views(payload))
    with WindowFile.open(path) as opened:
        assert opened.verify() == window


@pytest.mark.parametrize("expect", [{"rank": 0}, {"run_id": "run-2"}, {"world_size": 3}, {"start_iteration": 21}])
def test_not_the_expected_one(tmp_path: Path, expect: dict[str, object]) -> None:
    window, payload = sample_window(20, 1)
    write_window(tmp_path, window, views(payload))
    with pytest.raises(CheckpointError, match=f"{path_in(tmp_path)}: {next(iter(expect))}="):
        WindowFile.open(path_in(tmp_path), expect=expect)


def test_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    window, payload = sample_window(20, 1)
    path = tmp_path / "a.window"
    content = forge(window.to_bytes(), b"".join(payload))
    for offset, length in ((12, 2**63), (12, len(content)), (12, 2**64 - 1)):
        damaged = bytearray(content)
        struct.pack_into("<Q", damaged, offset, length)
        path.write_bytes(damaged)
        with pytest.raises(
            CheckpointError,
            match=f"manifest of {length} bytes: must have at most .*, and fit in the file of {len(content)} bytes",
        ):
            WindowFile.open(path)
    path.write_bytes(content)
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="1099511627776 bytes, but the manifest says"):
        WindowFile.open(path)


def test_a_truncation_after_opening_is_an_error_not_a_signal(tmp_path: Path) -> None:
    window, payload = sample_window(20, 1)
    write_window(tmp_path, window, views(payload))
    with WindowFile.open(path_in(tmp_path)) as opened:
        os.truncate(path_in(tmp_path), 8192)
        with pytest.raises(CheckpointError, match="ends too early, at byte 8192"):
            opened.verify()


def test_a_linked_directory_is_not_written_through(tmp_path: Path) -> None:
    window, payload = sample_window(20, 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / window_name(WindowKey(start_iteration=20, generation=0))).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="not a directory"):
        write_window(tmp_path, window, views(payload))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_failed_write_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window, payload = sample_window(20, 1)
    monkeypatch.setattr(files, "_write", lambda descriptor, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(CheckpointError, match=f"{path_in(tmp_path)}: cannot be written: .*full"):
        write_window(tmp_path, window, views(payload))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_failed_put_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a chunk fails, the file of an object store must not be closed, because closing it would store the partial
    object."""
    place = open_backend("memory://store/windows")
    closed, discarded = [], []

    class HalfFile(AbstractBufferedFile):  # type: ignore[misc]
        closed = False

        def __init__(self) -> None:
            """Open no upload."""

        def write(self, data: bytes) -> None:
            raise OSError(errno.EIO, "network")

        def close(self) -> None:
            closed.append(1)

        def discard(self) -> None:
            discarded.append(1)

    monkeypatch.setattr(fsspec.filesystem("memory"), "open", lambda path, mode: HalfFile())
    with pytest.raises(OSError, match="network"):
        place.write("window_0000001", "rank-00000.window", [b"x"])
    assert (closed, discarded) == ([], [1])


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(CheckpointError, match="nonsense://a"):
        open_backend("nonsense://a/b")


def test_a_slice_in_memory_is_checked() -> None:
    window, payload = sample_window(20, 1)
    window.slices[0].check_payload(memoryview(payload[0]), "here")
    damaged = bytearray(payload[0])
    damaged[0] ^= 128
    with pytest.raises(CheckpointError, match="here: damaged: 'weight'"):
        window.slices[0].check_payload(memoryview(damaged), "here")
    with pytest.raises(CheckpointError, match="slice of 4096 bytes"):
        window.slices[0].check_payload(memoryview(bytes(4096)), "here")


def test_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    window, payload = sample_window(20, 1)
    path = tmp_path / "a.window"
    path.write_bytes(forge(window.to_bytes(), b"".join(payload), version=3))
    with pytest.raises(CheckpointError, match="format_version=3: must be from 1 to 2"):
        WindowFile.open(path)


@pytest.mark.parametrize("version", [1, 2])
def test_every_version_is_read_bit_for_bit(version: int) -> None:
    """Every later version must read this file, which is not written again."""
    expected, payload = window_fixture.window()
    with WindowFile.open(window_fixture.FOLDER / f"version_{version}.window") as opened:
        window = opened.verify()
        slices = [bytes(opened.read_slice(index)) for index in range(window.num_slices)]
    assert slices == payload
    assert window.to_json() == {**expected.to_json(), "format_version": version}
    for record, content in zip(window.slices, slices, strict=True):
        for piece in record.pieces:
            data = window_fixture.content_of(record.iteration, piece.component, piece.num_bytes)
            assert content[piece.offset : piece.end] == data

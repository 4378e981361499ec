"""Tests which window is the newest, and which may be deleted."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import fsspec  # type: ignore[import-untyped]
import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.storage import backends
from megatron_ft.snapshot.storage.window_file import rank_name, window_name, write_window
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.testing.stored_samples import WORLD_SIZE, sample_window


@pytest.fixture(params=["folder", "object store", "other file system"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """Return a folder that does not exist yet, in each kind of storage."""
    urls = {"object store": f"memory://{uuid4().hex}/windows", "other file system": f"local://{tmp_path}/windows"}
    yield urls.get(request.param, tmp_path / "windows")
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def save(folder: Path | str, iteration: int, ranks: range = range(WORLD_SIZE), generation: int = 0) -> WindowKey:
    """Write the files of some ranks of a window."""
    for rank in ranks:
        manifest, payload = sample_window(iteration, rank)
        write_window(folder, replace(manifest, generation=generation), [memoryview(content) for content in payload])
    return key(iteration, generation)


def key(iteration: int, generation: int = 0) -> WindowKey:
    return WindowKey(start_iteration=iteration, generation=generation)


def test_nothing_there(folder: Path | str) -> None:
    assert WindowFolder(folder).list_windows() == []
    assert WindowFolder(folder).newest(WORLD_SIZE) == (None, [])


def test_the_newest_that_verifies_and_reports_on_the_others(folder: Path | str) -> None:
    windows = WindowFolder(folder)
    save(folder, 10)
    sound = save(folder, 20)
    save(folder, 30, ranks=range(1))
    found, damaged = windows.newest(WORLD_SIZE)
    assert found == sound
    assert [report.path for report in damaged] == [windows.describe(key(30))]
    assert rank_name(1) in damaged[0].reason


def test_another_generation_of_a_window_is_newer(folder: Path | str) -> None:
    first, second = save(folder, 20), save(folder, 20, generation=1)
    windows = WindowFolder(folder)
    assert windows.newest(WORLD_SIZE) == (second, [])
    save(folder, 20, generation=2, ranks=range(1))
    assert windows.newest(WORLD_SIZE)[0] == second
    assert windows.list_windows()[0] == first


def test_a_directory_that_is_not_named_as_it_is_written_is_no_window(tmp_path: Path) -> None:
    stored = save(tmp_path, 20)
    for name in ("window_00000020", "window_0000020.0", "window_0000020.01"):
        (tmp_path / name).mkdir()
    assert WindowFolder(tmp_path).list_windows() == [stored]


def test_files_of_two_windows_are_no_window(tmp_path: Path) -> None:
    stored = save(tmp_path, 20, ranks=range(1))
    manifest, payload = sample_window(20, 1)
    write_window(tmp_path, replace(manifest, plan={"other": 1}), [memoryview(content) for content in payload])
    with pytest.raises(CheckpointError, match="plan differs from rank 0's file:"):
        WindowFolder(tmp_path).verify(stored, WORLD_SIZE)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    stored = save(tmp_path, 20, ranks=range(1))
    directory = tmp_path / window_name(stored)
    (directory / rank_name(0)).rename(directory / rank_name(1))
    with pytest.raises(CheckpointError, match=f"{rank_name(1)}: rank=0: must be 1"):
        WindowFolder(tmp_path).open(stored, 1)


def test_another_world_size_is_no_complete_window(tmp_path: Path) -> None:
    stored = save(tmp_path, 20)
    with pytest.raises(CheckpointError, match="world_size=2: must be 1"):
        WindowFolder(tmp_path).verify(stored, 1)


def test_callers_share_the_reading(tmp_path: Path) -> None:
    stored = save(tmp_path, 20)
    path = tmp_path / window_name(stored) / rank_name(1)
    content = bytearray(path.read_bytes())
    content[-6000] ^= 1
    path.write_bytes(content)
    windows = WindowFolder(tmp_path)
    assert windows.verify(stored, WORLD_SIZE, part=0, num_parts=2).rank == 0
    with pytest.raises(CheckpointError, match=rank_name(1)):
        windows.verify(stored, WORLD_SIZE, part=1, num_parts=2)


def test_retention_keeps_the_newest_that_verify(folder: Path | str) -> None:
    windows = WindowFolder(folder)
    for iteration in (10, 20, 30, 40):
        save(folder, iteration)
    save(folder, 25, ranks=range(1))
    save(folder, 50, ranks=range(1))
    removed = windows.retain(2, WORLD_SIZE)
    assert [stored.start_iteration for stored in removed] == [10, 20, 25]
    assert [stored.start_iteration for stored in windows.list_windows()] == [30, 40, 50]


def test_retention_reads_no_more_than_its_part(tmp_path: Path) -> None:
    save(tmp_path, 10)
    stored = save(tmp_path, 20)
    path = tmp_path / window_name(stored) / rank_name(1)
    content = bytearray(path.read_bytes())
    content[-6000] ^= 1
    path.write_bytes(content)
    assert WindowFolder(tmp_path).retain(1, WORLD_SIZE) == []
    removed = WindowFolder(tmp_path).retain(1, WORLD_SIZE, part=0, num_parts=WORLD_SIZE)
    assert [found.start_iteration for found in removed] == [10]


def test_retention_deletes_nothing_while_too_few_verify(folder: Path | str) -> None:
    save(folder, 10, ranks=range(1))
    save(folder, 20)
    assert WindowFolder(folder).retain(2, WORLD_SIZE) == []
    assert len(WindowFolder(folder).list_windows()) == 2


def test_an_interrupted_deletion_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = WindowFolder(tmp_path)
    for iteration in (10, 20):
        save(tmp_path, iteration)
    monkeypatch.setattr(backends.shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("crash")))
    with pytest.raises(CheckpointError, match="cannot be deleted: crash"):
        windows.retain(1, WORLD_SIZE)
    monkeypatch.undo()
    assert windows.newest(WORLD_SIZE)[0] == key(20)
    save(tmp_path, 10)
    windows.retain(1, WORLD_SIZE)
    assert [path.name for path in tmp_path.iterdir()] == [window_name(key(20))]


def test_windows_of_an_abandoned_future_are_set_aside(folder: Path | str) -> None:
    windows = WindowFolder(folder)
    for _ in range(2):
        for iteration in (10, 20, 30):
            save(folder, iteration)
        moved = windows.set_aside_from(20)
        assert len(moved) == 2
        assert windows.newest(WORLD_SIZE) == (key(10), [])
    assert moved == ["superseded_window_0000020_1", "superseded_window_0000030_1"]

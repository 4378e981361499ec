"""Tests which checkpoint is the newest, after any crash."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage import checkpoints
from megatron_ft.snapshot.storage.checkpoints import (
    delete,
    directory_name,
    list_checkpoints,
    move_latest,
    newest_valid,
    read_latest,
    set_aside,
    start_directory,
    sweep,
)
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest

Make = Callable[..., Manifest]


def test_newest_valid_passes_over_damage_and_leftovers(tmp_path: Path, make: Make) -> None:
    for iteration in (10, 20, 30):
        make(tmp_path / directory_name(iteration), iteration)
    (tmp_path / directory_name(40)).mkdir()
    victim = tmp_path / directory_name(30) / "__0_0.distcp"
    victim.write_bytes(bytes(5000))
    path, reports = newest_valid(tmp_path)
    assert path == tmp_path / directory_name(20)
    assert [report.path.name for report in reports] == [directory_name(40), directory_name(30)]
    assert "no manifest" in reports[0].reason
    assert "__0_0.distcp" in reports[1].reason


def test_nothing_there(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "missing") == (None, [])
    assert read_latest(tmp_path) is None


def test_more_than_seven_digits_and_foreign_names(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "iter_12345678", 12345678)
    make(tmp_path / "iter_9999999", 9999999)
    for name in ("iter_30", "iter_abc", "iter_0000001x", "notes"):
        (tmp_path / name).mkdir()
    assert [stored.iteration for stored in list_checkpoints(tmp_path)] == [9999999, 12345678]


def test_a_complete_checkpoint_is_never_written_over(tmp_path: Path, make: Make) -> None:
    make(tmp_path / directory_name(10), 10)
    second = start_directory(tmp_path, 10)
    assert second.name == "iter_0000010.1"
    assert Manifest.verified(tmp_path / directory_name(10)).iteration == 10
    (second / "half").write_bytes(b"x")
    assert start_directory(tmp_path, 10) == second
    assert list(second.iterdir()) == []
    shutil.rmtree(second)
    make(second, 10)
    assert newest_valid(tmp_path)[0] == second


def test_latest_moves_only_to_complete_checkpoints(tmp_path: Path, make: Make) -> None:
    make(tmp_path / directory_name(10), 10)
    move_latest(tmp_path, tmp_path / directory_name(10), 10)
    assert read_latest(tmp_path) == tmp_path / directory_name(10)
    half = start_directory(tmp_path, 20)
    with pytest.raises(AssertionError, match="without a manifest"):
        move_latest(tmp_path, half, 20)
    assert read_latest(tmp_path) == tmp_path / directory_name(10)


@pytest.mark.parametrize("content", ["", "{}", '{"checkpoint": 3}', '{"checkpoint": "../../etc"}', "[1]"])
def test_damaged_latest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "latest").write_text(content)
    with pytest.raises(CheckpointError, match="latest"):
        read_latest(tmp_path)


def test_sweep_removes_leftovers_only(tmp_path: Path, make: Make) -> None:
    make(tmp_path / directory_name(10), 10)
    for iteration in (5, 15):
        (tmp_path / directory_name(iteration)).mkdir()
    (tmp_path / ".deleted_iter_0000001").mkdir()
    sweep(tmp_path, before_iteration=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [directory_name(10), directory_name(15)]


def test_interrupted_delete_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    make(tmp_path / directory_name(10), 10)

    def crash(path: object) -> None:
        raise OSError("crash")

    monkeypatch.setattr(checkpoints.shutil, "rmtree", crash)
    with pytest.raises(OSError, match="crash"):
        delete(tmp_path / directory_name(10))
    monkeypatch.undo()
    assert list_checkpoints(tmp_path) == []
    sweep(tmp_path, before_iteration=0)
    assert list(tmp_path.iterdir()) == []


def test_set_aside_keeps_the_bytes(tmp_path: Path, make: Make) -> None:
    for _ in range(2):
        make(tmp_path / directory_name(10), 10)
        moved = set_aside(tmp_path / directory_name(10))
        assert (moved / MANIFEST_NAME).is_file()
    assert newest_valid(tmp_path) == (None, [])
    assert len(list(tmp_path.iterdir())) == 2


def test_latest_never_names_what_was_set_aside(tmp_path: Path, make: Make) -> None:
    for iteration in (10, 20):
        make(tmp_path / directory_name(iteration), iteration)
    (tmp_path / directory_name(15)).mkdir()
    move_latest(tmp_path, tmp_path / directory_name(20), 20)
    set_aside(tmp_path / directory_name(20))
    assert read_latest(tmp_path) == tmp_path / directory_name(10)
    set_aside(tmp_path / directory_name(10))
    assert read_latest(tmp_path) is None


def test_every_crash_prefix_of_a_save_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """The complete old or the complete new checkpoint is loaded from the disk before each system call of a save."""
    folder = tmp_path / "live"
    make(folder / directory_name(10), 10)
    move_latest(folder, folder / directory_name(10), 10)
    states = 0

    def observe(function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal states
            check()
            states += 1
            return function(*args, **kwargs)

        return call

    def check() -> None:
        path, _ = newest_valid(folder)
        assert path is not None and path.name in (directory_name(10), directory_name(20))
        pointed = read_latest(folder)
        assert pointed is not None
        Manifest.verified(pointed)

    for name in ("write", "fsync", "rename", "close"):
        monkeypatch.setattr(os, name, observe(getattr(os, name)))
    shutil.rmtree(start_directory(folder, 20))
    make(folder / directory_name(20), 20)
    move_latest(folder, folder / directory_name(20), 20)
    delete(folder / directory_name(10))
    monkeypatch.undo()
    assert states > 20
    assert newest_valid(folder)[0] == folder / directory_name(20)


def test_a_renamed_checkpoint_is_passed_over_by_its_manifest(tmp_path: Path, make: Make) -> None:
    make(tmp_path / directory_name(14), 14)
    make(tmp_path / directory_name(5), 5)
    (tmp_path / directory_name(5)).rename(tmp_path / directory_name(50))
    path, (report,) = newest_valid(tmp_path)
    assert path == tmp_path / directory_name(14)
    assert report.path == tmp_path / directory_name(50) and "contains iteration 5, not 50" in report.reason


def test_a_pointer_nested_too_deep_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/latest: damaged: the JSON text is nested too deeply"):
        read_latest(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"7", "names the checkpoint iter_0000007, but this directory does not exist"),
        (b"../x", "must contain an iteration or 'release'"),
        (b"\xff", "cannot be read"),
        (b"1" * 80, "80 bytes: must be at most 64"),
        (b"5", "must be in Megatron's format torch_dist"),
    ],
)
def test_a_folder_of_megatron_that_names_no_checkpoint(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / checkpoints.MEGATRON_LATEST_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        checkpoints.newest_of_megatron(tmp_path)


def test_a_pipe_in_place_of_megatrons_tracker_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / checkpoints.MEGATRON_LATEST_NAME)
    with pytest.raises(CheckpointError, match=f"{checkpoints.MEGATRON_LATEST_NAME}: must be a regular file"):
        checkpoints.newest_of_megatron(tmp_path)


def test_the_newest_checkpoint_of_a_folder_of_megatron(tmp_path: Path) -> None:
    assert checkpoints.newest_of_megatron(tmp_path) is None
    assert checkpoints.newest_of_megatron(tmp_path / "none") is None
    for name, text in (("iter_0000012", "12\n"), ("release", "release")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
        (tmp_path / checkpoints.MEGATRON_LATEST_NAME).write_text(text)
        assert checkpoints.newest_of_megatron(tmp_path) == tmp_path / name

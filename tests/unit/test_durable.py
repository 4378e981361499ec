"""Tests files that are replaced and lines that are appended: readers find them complete, even after a writer was
killed."""

import os
import stat
from pathlib import Path

import pytest

from megatron_ft.durable import append_line, replace_file
from tests.helpers.disk import note_steps


def test_a_reader_has_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    replace_file(path, b"old")
    with path.open("rb") as opened:
        replace_file(path, b"new and longer")
        assert opened.read() == b"old"
    seen: list[bytes] = []

    def fail(_descriptor: int) -> None:
        seen.append(path.read_bytes())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(os, "fsync", fail)
        replace_file(path, b"newest")
    assert seen == [b"new and longer"], "it is on the disk before it has the name"
    replace_file(path, b"newest")
    assert path.read_bytes() == b"newest", "files of a writer that died do not matter"
    assert list(tmp_path.iterdir()) == [path]


def test_it_has_its_name_on_the_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = note_steps(monkeypatch)
    replace_file(tmp_path / "summary.json", b"{}")
    assert steps == ["fsync summary.json", "rename summary.json", f"fsync {tmp_path.name}"]


def test_it_is_written_through_no_link(tmp_path: Path) -> None:
    """Another user may have put a link where the temporary file is created."""
    (tmp_path / "victim").write_bytes(b"untouched")
    (tmp_path / "summary.json.tmp").symlink_to(tmp_path / "victim")
    replace_file(tmp_path / "summary.json", b"{}")
    assert (tmp_path / "victim").read_bytes() == b"untouched"
    assert not (tmp_path / "summary.json").is_symlink()


@pytest.mark.parametrize(("mode", "found"), [(0o666, 0o644), (0o600, 0o600)])
def test_its_mode_is_what_the_mask_leaves(tmp_path: Path, mode: int, found: int) -> None:
    mask = os.umask(0o022)
    try:
        replace_file(tmp_path / "summary.json", b"{}", mode=mode)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "summary.json").stat().st_mode) == found


@pytest.mark.parametrize("half", [b"x", b'{"generation": 2, "rea', b"x" * 200_000])
@pytest.mark.parametrize("before", [b"", b'{"generation": 1}\n', b"y" * 70_000 + b"\n"])
def test_a_line_is_not_appended_to_half_a_line(tmp_path: Path, before: bytes, half: bytes) -> None:
    """A controller that is killed while it writes a decision leaves a partial line. Its successor makes the same
    decision."""
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(before + half)
    append_line(path, b'{"generation": 2}\n')
    append_line(path, b'{"generation": 3}\n')
    assert path.read_bytes() == before + b'{"generation": 2}\n{"generation": 3}\n'

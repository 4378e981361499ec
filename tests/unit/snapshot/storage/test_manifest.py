"""Tests that damage of every kind is detected, and that the error names the file."""

import errno
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage import files
from megatron_ft.snapshot.storage.files import FileEntry, write_atomically, write_file
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest

Make = Callable[..., Manifest]


def test_round_trip(tmp_path: Path, make: Make) -> None:
    manifest = make(tmp_path / "c")
    assert Manifest.verified(tmp_path / "c") == manifest
    assert "iteration 30" in manifest.summary()
    assert not list((tmp_path / "c").glob("*.tmp"))


def test_every_flipped_bit_is_found(tmp_path: Path, make: Make) -> None:
    """400 random single-bit flips in data and manifest are all detected."""
    directory = tmp_path / "c"
    make(directory, sizes=(300, 40))
    generator = random.Random(7)
    paths = sorted(directory.iterdir())
    for trial in range(400):
        path = paths[trial % len(paths)]
        original = path.read_bytes()
        damaged = bytearray(original)
        position = generator.randrange(len(damaged))
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            Manifest.verified(directory)
        path.write_bytes(original)
    Manifest.verified(directory)


def test_every_truncation_of_the_manifest_is_found(tmp_path: Path, make: Make) -> None:
    directory = tmp_path / "c"
    make(directory, sizes=(3,))
    content = (directory / MANIFEST_NAME).read_bytes()
    for length in range(len(content) - 1):
        (directory / MANIFEST_NAME).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=MANIFEST_NAME):
            Manifest.read(directory)


@pytest.mark.parametrize(
    "damage", ["missing", "extra", "truncated", "longer", "symlink", "directory", "swapped", "fifo"]
)
def test_damaged_listing(tmp_path: Path, damage: str, make: Make) -> None:
    directory = tmp_path / "c"
    make(directory)
    victim = directory / "__0_0.distcp"
    named = victim.name
    if damage == "missing":
        victim.unlink()
    elif damage == "extra":
        named = "stray"
        (directory / named).write_bytes(b"x")
    elif damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:4096])
    elif damage == "longer":
        victim.write_bytes(victim.read_bytes() + b"\0")
    elif damage == "symlink":
        os.rename(victim, tmp_path / "elsewhere")
        victim.symlink_to(tmp_path / "elsewhere")
    elif damage == "directory":
        victim.unlink()
        victim.mkdir()
    elif damage == "swapped":
        victim.write_bytes(random.Random(1).randbytes(5000))
    elif damage == "fifo":
        victim.unlink()
        os.mkfifo(victim)
    with pytest.raises(CheckpointError, match=named):
        Manifest.verified(directory)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", ".", "..", "a//b", "a b", "a\0b", "ä", "", "x" * 300, "a/./b"]
)
def test_hostile_names_are_refused(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "c"
    directory.mkdir()
    body = Manifest(
        run_id="r",
        run_name="r",
        generation=0,
        topology={},
        iteration=1,
        consumed_samples=0,
        settings={},
        software={},
        files=(FileEntry(name=name, num_bytes=0, xxh3_128="0" * 32),),
    )
    (directory / MANIFEST_NAME).write_bytes(body.to_bytes())
    with pytest.raises(CheckpointError, match="must be a relative path|cannot"):
        Manifest.verified(directory)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"format_version": 99}', b'{"format_version": true}', b"[" * 100_000,
     b'{"a":1,"a":2}', b'{"iteration": NaN}', b'{"format_version": 1, "files": 3}', b"9" * 10_000],
)  # fmt: skip
def test_hostile_manifests_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        Manifest.verified(tmp_path)


def test_wrong_types_with_a_matching_checksum_are_refused(tmp_path: Path, make: Make) -> None:
    directory = tmp_path / "c"
    manifest = make(directory)
    for key, value in [
        ("iteration", "30"),
        ("iteration", True),
        ("topology", []),
        ("files", [{"name": "x"}]),
        ("run_id", 3),
    ]:
        body = json.loads(manifest.to_bytes())
        body.pop("manifest_xxh3_128")
        body[key] = value
        from megatron_ft.snapshot.storage.manifest import _body_checksum

        body["manifest_xxh3_128"] = _body_checksum(body)
        (directory / MANIFEST_NAME).write_text(json.dumps(body))
        with pytest.raises(CheckpointError, match="type"):
            Manifest.verified(directory)


def test_parts_cover_every_file_once(tmp_path: Path, make: Make) -> None:
    """Exactly one of three parts finds each damaged file with shared verification."""
    directory = tmp_path / "c"
    make(directory, sizes=(10, 20, 30, 40, 50))
    for path in sorted(directory.glob("*.distcp")):
        original = path.read_bytes()
        path.write_bytes(bytes(len(original)))
        found = 0
        for part in range(3):
            try:
                Manifest.verified(directory, part=part, num_parts=3)
            except CheckpointError as error:
                assert path.name in str(error)
                found += 1
        assert found == 1
        path.write_bytes(original)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    write_atomically(tmp_path, "latest", b"old")

    def fail(descriptor: int, data: memoryview) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(files, "_write", fail)
    with pytest.raises(OSError, match=os.strerror(error)):
        write_atomically(tmp_path, "latest", b"new")
    assert (tmp_path / "latest").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(files, "_write", lambda descriptor, data: real(descriptor, data[:3]))
    entry = write_file(tmp_path, "f", b"0123456789")
    assert (tmp_path / "f").read_bytes() == b"0123456789"
    assert entry.num_bytes == 10


def test_version_1_is_read_and_says_nothing_of_settings(tmp_path: Path) -> None:
    """Every later version must read this file, which is not written again."""
    fixture = Path(__file__).parents[3] / "fixtures" / "checkpoints" / "version_1.json"
    (tmp_path / MANIFEST_NAME).write_bytes(fixture.read_bytes())
    manifest = Manifest.verified(tmp_path)
    assert (manifest.format_version, manifest.run_id, manifest.run_name) == (1, "first", "first")
    assert (manifest.iteration, manifest.generation, manifest.settings) == (30, 1, {})


def test_settings_of_other_types_are_refused(tmp_path: Path, make: Make) -> None:
    manifest = make(tmp_path / "c")
    for settings in (3, [], {"optimizer": 3}, {"optimizer": {"optimizer.lr": float("nan")}}):
        body = replace(manifest, settings=settings)  # type: ignore[arg-type]
        (tmp_path / "c" / MANIFEST_NAME).write_bytes(body.to_bytes())
        with pytest.raises(CheckpointError, match=MANIFEST_NAME):
            Manifest.read(tmp_path / "c")

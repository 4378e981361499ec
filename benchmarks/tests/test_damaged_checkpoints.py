"""Tests that the claim would notice a wrong load, a name that was not synced, and a hostile file that was accepted."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import crashes, damaged_checkpoints
from benchmarks.crashes import Recorder, crash_states, torn_files
from benchmarks.damaged_checkpoints import Tally
from benchmarks.hostile_files import Hostile, hostile_checkpoints, hostile_windows
from megatron_ft.snapshot import window
from megatron_ft.snapshot.storage import backends, checkpoints, files, manifest
from megatron_ft.testing.stored_samples import KINDS, NEW, OLD, Kind, Loaded

WINDOW, DENSE = KINDS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_samples_load(tmp_path: Path, kind: Kind) -> None:
    for iteration in (OLD, NEW):
        kind.save(tmp_path, iteration)
        assert kind.load(tmp_path) == Loaded(iteration=iteration, is_equal=True, reasons=())
        assert all(path.is_file() for path in kind.files(tmp_path, iteration))
    kind.retire(tmp_path)
    assert not any(path.exists() for path in kind.files(tmp_path, OLD))


@pytest.mark.parametrize(
    ("loaded", "outcome"),
    [
        (Loaded(iteration=NEW, is_equal=False, reasons=()), "silent"),
        (Loaded(iteration=OLD, is_equal=False, reasons=("x/a: damaged",)), "silent"),
        (Loaded(iteration=NEW, is_equal=True, reasons=()), "harmless"),
        (Loaded(iteration=None, is_equal=True, reasons=("x/a: damaged",)), "lost"),
        (Loaded(iteration=OLD, is_equal=True, reasons=("damaged",)), "unnamed"),
        (Loaded(iteration=OLD, is_equal=True, reasons=("x/a: damaged",)), "detected"),
    ],
)
def test_outcomes(loaded: Loaded, outcome: str) -> None:
    assert damaged_checkpoints.judge(loaded, Path("x/a")) == outcome


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("what", ["files", "directories"])
def test_a_missing_sync_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, what: str) -> None:
    if what == "files":
        monkeypatch.setattr(files.HashedFile, "commit", _commit_without_sync)
    else:
        for module in (files, checkpoints, backends):
            monkeypatch.setattr(module, "fsync_directory", lambda directory: None)
    tally = Tally()
    damaged_checkpoints.crash(kind, tmp_path, tally, stride=501)
    assert tally.problems
    assert tally.outcomes["crash_broken"] == len(tally.problems)


def _commit_without_sync(file: files.HashedFile) -> files.FileEntry:
    file.close()
    return files.FileEntry(name=file.name, num_bytes=file.num_bytes, xxh3_128=file._hash.hexdigest())


def test_a_pointer_that_moved_too_early_is_noticed(tmp_path: Path) -> None:
    DENSE.save(tmp_path, OLD)
    assert not DENSE.pointer_leads_nowhere(tmp_path)
    (tmp_path / checkpoints.directory_name(OLD) / manifest.MANIFEST_NAME).unlink()
    assert DENSE.pointer_leads_nowhere(tmp_path)
    tally = Tally()
    damaged_checkpoints.crash(
        replace(DENSE, pointer_leads_nowhere=lambda store: store.exists()), tmp_path / "crash", tally, stride=501
    )
    assert tally.problems


def test_an_unchecked_data_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_check_content", lambda directory, entry: None)
    tally = Tally()
    damaged_checkpoints.tear(DENSE, tmp_path, tally)
    assert tally.outcomes["torn_silent"] > 0


def test_an_unchecked_payload_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window.Slice, "check_hash", lambda *arguments: None)
    tally = Tally()
    damaged_checkpoints.flip(WINDOW, tmp_path, tally, 120)
    assert tally.outcomes["flip_silent"] > 0
    assert all("payload of" in problem for problem in tally.problems)


def test_an_error_without_its_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "naming", lambda path: contextlib.nullcontext())
    tally = Tally()
    damaged_checkpoints.fail(DENSE, tmp_path / "store", tally, stride=5)
    assert any("write 0 fails with ENOSPC" in problem for problem in tally.problems)


def test_a_file_that_is_let_pass_is_noticed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for iteration in (OLD, NEW):
        WINDOW.save(store, iteration)
    tally = Tally()
    damaged_checkpoints.meet(WINDOW, store, Hostile(name="harmless", put=lambda folder: folder), tally)
    assert tally.problems == ["harmless: accepted"]


def test_hostile_files_are_many_and_distinct() -> None:
    cases = [*hostile_windows(), *hostile_checkpoints()]
    assert len({case.name for case in cases}) == len(cases) >= damaged_checkpoints.MIN_HOSTILE


def test_every_class_of_bytes_is_flipped(tmp_path: Path) -> None:
    WINDOW.save(tmp_path, NEW)
    path = WINDOW.files(tmp_path, NEW)[0]
    found = damaged_checkpoints.classes(path)
    assert {"magic", "version", "length", "checksum", "padding before the payload", "padding in a slice"} < set(found)
    assert {"field run_id", "field plan", "field pieces", "payload of weight", "payload of step"} < set(found)
    positions = sorted(position for group in found.values() for position in group)
    assert positions == list(range(path.stat().st_size))


def test_the_disk_loses_what_was_not_synced(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    recorder = Recorder(live)
    with recorder.recording():
        files.write_file(live, "a", b"content")
    calls = [change.call for change in recorder.changes]
    assert calls == ["link", "write", "sync"]
    seen = set()
    for number, (_, make) in enumerate(crash_states(recorder.before, recorder.changes, 0)):
        make().write_to(tmp_path / str(number))
        path = tmp_path / str(number) / "a"
        seen.add(path.read_bytes() if path.exists() else None)
    assert {None, b"", b"content", bytes(7)} <= seen


def test_torn_files_are_cut_beside_every_page() -> None:
    content = os.urandom(crashes.PAGE_BYTES + 10)
    damaged = torn_files(content, bytes(len(content)))
    lengths = {len(data) for what, data in damaged.items() if what.startswith("cut")}
    assert lengths == {0, 1, 4095, 4096, 4097}
    assert damaged["doubled page at 4096"] == content[:4096] * 2
    assert damaged["stale page at 0"] == bytes(4096) + content[4096:]

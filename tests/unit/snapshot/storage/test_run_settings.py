"""Tests which saved state of a run refuses a job with other settings, by the manifests alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.config.identity import JobIdentity
from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.run_settings import SETTINGS, check_same_settings
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.testing.stored_samples import sample_window
from tests.unit.snapshot.storage.conftest import make_checkpoint

OWN = {"optimizer": {"optimizer.lr": 0.001}, "data": {"data.fingerprint": "f", "data.seed": 1}}
OTHER_RATE = {**OWN, "optimizer": {"optimizer.lr": 0.5}}
OTHER_DATA = {**OWN, "data": {"data.fingerprint": "g", "data.seed": 2}}
JOB = JobIdentity(run_id="5" * 32, run_name="first", settings=OWN)


def checkpoint(run_dir: Path, iteration: int, settings: object, run_id: str = JOB.run_id) -> Path:
    directory = run_dir / "checkpoints" / directory_name(iteration)
    manifest: Manifest = make_checkpoint(directory, iteration)
    replace(manifest, run_id=run_id, settings=settings).write(directory)  # type: ignore[arg-type]
    return directory


def window(run_dir: Path, start: int, settings: object, run_id: str = JOB.run_id) -> None:
    found, payload = sample_window(start, 0)
    found.slices[0] = replace(found.slices[0], header={SETTINGS: json.dumps(settings)})
    write_window(run_dir / "windows", replace(found, run_id=run_id), [memoryview(part) for part in payload])


def check(run_dir: Path, *, compares_data: bool = True, allow_other_data: bool = False) -> None:
    windows = WindowFolder(run_dir / "windows")
    check_same_settings(run_dir, JOB, windows=windows, compares_data=compares_data, allow_other_data=allow_other_data)


def test_the_newest_checkpoint_of_the_run_decides(tmp_path: Path) -> None:
    check(tmp_path)
    checkpoint(tmp_path, 10, OTHER_RATE)
    with pytest.raises(CheckpointError, match=r"iter_0000010: was written with.*optimizer\.lr: was 0\.5, now 0\.001"):
        check(tmp_path)
    newest = checkpoint(tmp_path, 20, OWN)
    check(tmp_path)
    checkpoint(tmp_path, 30, OTHER_RATE, run_id="6" * 32)
    check(tmp_path)
    (newest / MANIFEST_NAME).write_text("{")
    with pytest.raises(CheckpointError, match="iter_0000010"):
        check(tmp_path)


def test_a_window_decides_where_it_is_newer(tmp_path: Path) -> None:
    window(tmp_path, 30, OTHER_RATE)
    with pytest.raises(CheckpointError, match=r"0000030.*was captured with.*optimizer\.lr: was 0\.5, now 0\.001"):
        check(tmp_path)
    checkpoint(tmp_path, 40, OWN)
    check(tmp_path)
    window(tmp_path, 50, OTHER_RATE, run_id="6" * 32)
    check(tmp_path)
    window(tmp_path, 60, OTHER_DATA)
    with pytest.raises(CheckpointError, match=r"0000060.*data\.seed: was 2, now 1"):
        check(tmp_path, allow_other_data=True)
    check(tmp_path, compares_data=False)


def test_other_data_of_a_checkpoint_may_be_allowed_or_unknown(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, OTHER_DATA)
    with pytest.raises(CheckpointError, match=r"data\.seed: was 2, now 1"):
        check(tmp_path)
    check(tmp_path, allow_other_data=True)
    check(tmp_path, compares_data=False)

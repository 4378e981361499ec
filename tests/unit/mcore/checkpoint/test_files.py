"""Tests which checkpoints of a run's folder belong to the run, by their manifests alone."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_ft.config.identity import JobIdentity
from megatron_ft.errors import CheckpointError, MegatronFtError, UnreadableError
from megatron_ft.mcore.checkpoint.files import CheckpointFinder
from megatron_ft.snapshot.storage.checkpoints import directory_name, list_checkpoints
from megatron_ft.snapshot.storage.files import write_file
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from tests.helpers.disk import fail_to_read

RUN_ID = "5" * 32
SETTINGS = {
    "data": {"data.fingerprint": "f", "data.seed": 1},
    "model": {"model.hidden_size": 128},
    "optimizer": {"optimizer.weight_decay": 0.1},
    "schedule": {"optimizer.lr": 0.001},
}
JOB = JobIdentity(run_id=RUN_ID, run_name="first", settings=SETTINGS)
VERSION_1 = Path(__file__).parents[3] / "fixtures" / "checkpoints" / "version_1.json"


class OneRank:
    """``Collectives`` of a job of one rank."""

    rank, num_ranks = 0, 1

    def from_first(self, record: Any) -> Any:
        return json.loads(json.dumps(record))

    def errors(self, error: str | None) -> str | None:
        return error


def save(folder: Path, iteration: int, *, name: int | None = None, **changes: Any) -> Path:
    """Save a valid checkpoint. ``name`` is the iteration in the name of its folder."""
    path = folder / directory_name(iteration if name is None else name)
    path.mkdir(parents=True)
    entry = write_file(path, "__0_0.distcp", os.urandom(100))
    manifest = Manifest(
        run_id=RUN_ID,
        run_name="first",
        generation=0,
        topology={"world_size": 2},
        iteration=iteration,
        consumed_samples=0,
        settings=SETTINGS,
        software={},
        files=(entry,),
    )
    replace(manifest, **changes).write(path)
    return path


def finder(job: JobIdentity = JOB, **options: Any) -> tuple[CheckpointFinder, list[str]]:
    reports: list[str] = []
    found = CheckpointFinder(
        OneRank(),  # type: ignore[arg-type]
        job,
        lambda _, path, reason: reports.append(f"{path.name}: {reason}"),
        **options,
    )
    return found, reports


def other(concern: str, key: str, value: object) -> dict[str, Any]:
    return {**SETTINGS, concern: {**SETTINGS[concern], key: value}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": 50}, "contains iteration 20, not 50"),
        ({"run_id": "6" * 32, "run_name": "second"}, "belongs to another run, second"),
        ({"run_id": "6" * 32}, "belongs to another run, first"),
    ],
)
def test_a_checkpoint_that_is_not_the_run_s_is_passed_over_and_set_aside(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    own = save(tmp_path, 14)
    foreign = save(tmp_path, 20, **changes)
    found, reports = finder()
    assert found.newest(tmp_path) == own
    assert reason in found.foreign[foreign] and str(foreign) in found.foreign[foreign]
    found.set_foreign_aside()
    assert [stored.path for stored in list_checkpoints(tmp_path)] == [own]
    assert (tmp_path / f"foreign_{foreign.name}" / MANIFEST_NAME).exists()
    assert json.loads((tmp_path / "latest").read_text())["checkpoint"] == own.name
    (report,) = reports
    assert report.startswith(f"{foreign.name}: foreign, renamed to foreign_{foreign.name}: ") and reason in report
    assert found.newest(tmp_path) == own and not found.foreign


def test_where_none_is_the_run_s_nothing_is_renamed(tmp_path: Path) -> None:
    foreign = save(tmp_path, 20, run_id="6" * 32)
    found, reports = finder()
    assert found.newest(tmp_path) is None and list(found.foreign) == [foreign]
    assert foreign.exists() and not reports


@pytest.mark.parametrize(
    ("concern", "key", "value"),
    [
        ("data", "data.seed", 2),
        ("model", "model.hidden_size", 64),
        ("optimizer", "optimizer.weight_decay", 0.0),
        ("schedule", "optimizer.lr", 0.5),
    ],
)
def test_another_data_model_optimizer_or_schedule_is_refused_and_the_key_named(
    tmp_path: Path, concern: str, key: str, value: object
) -> None:
    save(tmp_path, 10)
    settings = other(concern, key, value)
    if concern == "data":
        settings = {**settings, "data": {**settings["data"], "data.fingerprint": "g"}}
    written = save(tmp_path, 20, settings=settings)
    found, _ = finder()
    with pytest.raises(CheckpointError) as caught:
        found.newest(tmp_path)
    assert str(caught.value).startswith(f"{written}: was written with other settings than this job has: {key}: was ")
    assert f"was {value}, now {SETTINGS[concern][key]}" in str(caught.value)
    assert f"checkpoint.load={written}" in str(caught.value)
    assert written.exists()


def test_other_data_goes_on_where_a_key_says_so(tmp_path: Path) -> None:
    written = save(tmp_path, 20, settings=other("data", "data.fingerprint", "g"))
    found, _ = finder(allow_other_data=True)
    assert found.newest(tmp_path) == written


def test_another_layout_is_the_same_job(tmp_path: Path) -> None:
    written = save(tmp_path, 20, topology={"world_size": 64})
    assert finder()[0].newest(tmp_path) == written


def test_what_a_load_on_purpose_differs_in_is_reported(tmp_path: Path) -> None:
    written = save(tmp_path, 20, name=30, run_id="6" * 32, settings=other("schedule", "optimizer.lr", 0.5))
    found, _ = finder()
    manifest = found.check(written, trust=False)
    assert manifest is not None
    assert found.differences(written, manifest) == (
        f"{written}: contains iteration 20, not 30 as in its name: the directory was "
        "renamed, or its files were replaced",
        "optimizer.lr: was 0.5, now 0.001",
    )
    elsewhere = written.rename(tmp_path / "best")
    run, rate = found.differences(elsewhere, manifest)
    assert "belongs to another run, first" in run and rate == "optimizer.lr: was 0.5, now 0.001"


def test_format_1_is_the_run_s_only_where_the_run_is_older_than_format_2(tmp_path: Path) -> None:
    path = tmp_path / directory_name(30)
    path.mkdir()
    (path / MANIFEST_NAME).write_bytes(VERSION_1.read_bytes())
    found, _ = finder()
    assert found.newest(tmp_path) is None and "it has format 1" in found.foreign[path]
    older, _ = finder(replace(JOB, takes_format_1=True))
    assert older.newest(tmp_path) == path
    (note,) = older.differences(path, older.verify(path))
    assert "cannot be compared" in note
    renamed, _ = finder(replace(JOB, takes_format_1=True, run_name="second"))
    assert renamed.newest(tmp_path) is None


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_a_checkpoint_that_the_storage_cannot_read_keeps_its_name(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 20)
    path = save(tmp_path, 40)
    fail_to_read(monkeypatch, "__0_0.distcp", times=2, error=error)
    search, reports = finder()
    with pytest.raises(UnreadableError, match=f"__0_0.distcp: .*{os.strerror(error)}.*move {path}") as caught:
        search.newest(tmp_path)
    assert caught.value.checkpoint == path and path.is_dir() and reports == []
    assert caught.value.exit_code == MegatronFtError.exit_code, "a restart may succeed"
    assert search.newest(tmp_path) == path


def test_a_second_look_is_enough_after_one_error_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 40)
    failed = fail_to_read(monkeypatch, "__0_0.distcp", times=1)
    assert finder()[0].newest(tmp_path) == path and failed == [str(path / "__0_0.distcp")]


def test_a_checkpoint_whose_file_is_gone_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = save(tmp_path, 20)
    save(tmp_path, 40)
    fail_to_read(monkeypatch, "__0_0.distcp", times=1, error=errno.ENOENT)
    search, reports = finder()
    assert search.newest(tmp_path) == older
    assert [text.partition(",")[0] for text in reports] == ["iter_0000040: damaged"]


def test_damage_that_another_rank_finds_counts_more_than_an_error_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (search, _) = save(tmp_path, 40), finder()
    monkeypatch.setattr(OneRank, "errors", lambda self, error: error or "rank 1: damaged")
    fail_to_read(monkeypatch, "__0_0.distcp", times=2)
    with pytest.raises(CheckpointError, match="rank 1: damaged") as caught:
        search.verify(path)
    assert type(caught.value) is CheckpointError

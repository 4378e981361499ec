"""Tests how the folder of a run is claimed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_ft.config.job import RunConfig
from megatron_ft.control import rundir
from megatron_ft.control.rundir import RunDir, RunId, _has_state, check_claim, has_complete_state, is_claimed
from megatron_ft.errors import ConfigError
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME
from tests.helpers.disk import note_steps


def claimed(runs: Path, name: str | None = None, resume: str = "never", yaml: str = "a: 1\n") -> RunDir:
    return RunDir.claim(RunConfig(dir=str(runs), name=name, resume=resume), model_name="tiny", config_yaml=yaml)


def test_runs_without_a_name_are_numbered(tmp_path: Path) -> None:
    assert claimed(tmp_path / "new").name == "tiny-001"
    assert claimed(tmp_path / "new").name == "tiny-002"
    (tmp_path / "new" / "tiny-041").mkdir()
    (tmp_path / "new" / "tiny-large-099").mkdir()
    assert claimed(tmp_path / "new").name == "tiny-042"


def test_jobs_started_together_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        names = [run.name for run in threads.map(lambda _: claimed(tmp_path), range(32))]
    assert sorted(names) == [f"tiny-{number:03d}" for number in range(1, 33)]


def test_a_folder_has_its_configuration_and_places_for_logs_and_checkpoints(tmp_path: Path) -> None:
    run = claimed(tmp_path, "x")
    assert (run.path / "config.yaml").read_text() == "a: 1\n"
    assert (run.path / "logs").is_dir() and (run.path / "checkpoints").is_dir()
    assert run.resume_from is None


def test_a_folder_is_found_after_the_death_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = note_steps(monkeypatch)
    claimed(tmp_path / "all" / "runs", "first").release()
    made = [f"fsync {tmp_path.name}", "fsync all", "fsync runs"]
    written = [f"{step} {name}" for name in ("run_id.json", "config.yaml") for step in ("fsync", "rename")]
    assert steps == [*made, *written[:2], "fsync first", *written[2:], "fsync first"]


def test_who_has_a_folder_is_seen_without_taking_it(tmp_path: Path) -> None:
    assert not is_claimed(tmp_path / "x")
    run = claimed(tmp_path, "x")
    assert is_claimed(run.path)
    run.release()
    assert not is_claimed(run.path)
    claimed(tmp_path, "x", "auto").release()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a b", "ü", "x" * 129])
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.name="):
        claimed(tmp_path, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("existing", "resume", "result"),
    [
        ("none", "never", "fresh"),
        ("none", "auto", "fresh"),
        ("none", "must", "run.name=x: must be a folder in"),
        ("empty", "never", "fresh"),
        ("empty", "auto", "fresh"),
        ("empty", "must", "run.resume=must: needs a checkpoint to continue from"),
        ("checkpoint", "never", "run.name=x: exists"),
        ("checkpoint", "auto", "resumed"),
        ("checkpoint", "must", "resumed"),
        ("none", "perhaps", "run.resume=perhaps: must be one of"),
    ],
)
def test_resume(tmp_path: Path, existing: str, resume: str, result: str) -> None:
    if existing != "none":
        first = claimed(tmp_path, "x")
        if existing == "checkpoint":
            (first.path / "checkpoints" / "iteration-7").mkdir()
        first.release()
    if result in ("fresh", "resumed"):
        run = claimed(tmp_path, "x", resume)
        assert run.resume_from == (run.path / "checkpoints" if result == "resumed" else None)
    else:
        with pytest.raises(ConfigError) as caught:
            claimed(tmp_path, "x", resume)
        assert result in str(caught.value)
        assert (tmp_path / "x").exists() is (existing != "none")


def test_resume_must_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^run\.name="):
        claimed(tmp_path, None, "must")


def test_a_folder_has_one_job_at_a_time(tmp_path: Path) -> None:
    first = claimed(tmp_path, "x")
    with pytest.raises(ConfigError, match="used by a running job"):
        claimed(tmp_path, "x", "auto")
    first.release()
    claimed(tmp_path, "x", "auto").release()


def test_an_earlier_configuration_is_kept(tmp_path: Path) -> None:
    for text in ("a: 1\n", "a: 2\n", "a: 2\n", "a: 3\n"):
        run = claimed(tmp_path, "x", "auto", text)
        run.release()
    assert {path.name: path.read_text() for path in run.path.glob("config*")} == {
        "config.yaml": "a: 3\n",
        "config-001.yaml": "a: 1\n",
        "config-002.yaml": "a: 2\n",
    }


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^run\.dir="):
        claimed(tmp_path / "file")


def test_a_save_that_never_finished_is_no_state_to_continue_from(tmp_path: Path) -> None:
    """After an interrupted job, the advice names ``run.resume=must`` only if that would be accepted."""
    folder = tmp_path / "checkpoints" / "iter_0000005"
    folder.mkdir(parents=True)
    assert _has_state(tmp_path) and not has_complete_state(tmp_path)
    (folder / MANIFEST_NAME).touch()
    assert has_complete_state(tmp_path)
    (tmp_path / "other" / "windows" / "window_0000012").mkdir(parents=True)
    assert has_complete_state(tmp_path / "other")


def test_a_folder_that_is_moved_away_is_missed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "_LOOK_SECONDS", 0.01)
    run, missed = claimed(tmp_path, "x"), threading.Semaphore(0)
    with run.watched(missed.release):
        assert run.is_there
        run.path.rename(tmp_path / "elsewhere")
        assert missed.acquire(timeout=10)
        run.path.mkdir()
        assert not run.is_there, "another folder of that name is not the run's"
        run.path.rmdir()
        assert not missed.acquire(timeout=0.1), "it is reported once"
        (tmp_path / "elsewhere").rename(run.path)
        assert run.is_there
    run.release()


def test_a_start_that_trained_nothing_does_not_take_the_name(tmp_path: Path) -> None:
    first = claimed(tmp_path, "err", yaml="a: 1\n")
    (first.path / "logs" / "rank-00000.log").write_text("it failed")
    (first.path / "metrics.jsonl").write_text("")
    first_id = RunId.read(first.path)
    first.release()
    second = claimed(tmp_path, "err", yaml="a: 2\n")
    assert second.path == first.path and second.resume_from is None
    assert (second.path / "failed-start-001" / "logs" / "rank-00000.log").read_text() == "it failed"
    assert (second.path / "config.yaml").read_text() == "a: 2\n"
    assert RunId.read(second.path) != first_id
    second.release()
    claimed(tmp_path, "err").release()
    assert {path.name for path in first.path.glob("failed-start-*")} == {"failed-start-001", "failed-start-002"}


@pytest.mark.parametrize("state", ["metrics.jsonl", "checkpoints/iter_0000001", "control/window_generations"])
def test_a_run_with_something_to_lose_keeps_its_name(tmp_path: Path, state: str) -> None:
    run = claimed(tmp_path, "err")
    run.release()
    (run.path / state).parent.mkdir(exist_ok=True)
    (run.path / state).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"run\.name=err: exists in "):
        claimed(tmp_path, "err")
    with pytest.raises(ConfigError, match=r"run\.name=err: exists in "):
        check_claim(RunConfig(dir=str(tmp_path), name="err"))


def test_a_claim_is_checked_without_a_change(tmp_path: Path) -> None:
    check_claim(RunConfig(dir=str(tmp_path / "new" / "runs"), name="a"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir=.*is a file"):
        check_claim(RunConfig(dir=str(tmp_path / "file" / "runs"), name="a"))
    with pytest.raises(ConfigError, match=r"run\.name=file: must be a folder"):
        check_claim(RunConfig(dir=str(tmp_path), name="file"))
    with pytest.raises(ConfigError, match=r"run\.name=a: must be a folder in .*run\.resume=must"):
        check_claim(RunConfig(dir=str(tmp_path), name="a", resume="must"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    used = claimed(tmp_path, "a")
    with pytest.raises(ConfigError, match="is used by a running job"):
        check_claim(RunConfig(dir=str(tmp_path), name="a", resume="auto"))
    used.release()
    with pytest.raises(ConfigError, match="needs a checkpoint to continue from"):
        check_claim(RunConfig(dir=str(tmp_path), name="a", resume="must"))
    check_claim(RunConfig(dir=str(tmp_path), name="a"))

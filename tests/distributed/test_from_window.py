"""Tests dense checkpoints that are made from windows on storage: they have the bits of those that an undisturbed run
saves, and the folder of the run does not change."""

import hashlib
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import yaml

from megatron_ft.mcore.convert import window_replay
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.snapshot.storage.window_file import rank_name, window_name
from megatron_ft.snapshot.storage.window_folder import RejectedWindow, WindowFolder, window_digest
from megatron_ft.testing.jobs import JobResult, start
from tests.distributed.test_snapshots import LAYOUT, SNAPSHOTS, alter_vote, of_kind, train
from tools import convert_checkpoint, inspect_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # starts jobs

PERSISTING = (*LAYOUT, *SNAPSHOTS, "snapshot.persist_interval_windows=1", "snapshot.keep_persisted=0")
KILL = 'kill(at_iteration=13,phase="forward",rank=0)'


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> JobResult:
    """Return a run without snapshots that saves every iteration."""
    saving = ("checkpoint.save_interval_iterations=1", "checkpoint.keep_last=0")
    job = train(tmp_path_factory.mktemp("undisturbed"), warm_forkserver, *LAYOUT, *saving)
    assert job.exit_code == 0, job.output
    return job


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> JobResult:
    """Return a run that died and left windows, but no checkpoint."""
    job = train(tmp_path_factory.mktemp("died"), warm_forkserver, *PERSISTING, faults=[KILL])
    assert job.exit_code != 0 and not list((job.run_dir / "checkpoints").iterdir()), job.output
    assert len(WindowFolder(job.run_dir / "windows").list_windows()) > 1
    return job


def convert(run_dir: Path, out: Path, *words: str) -> int:
    return convert_checkpoint.main(["from-window", str(run_dir), str(out), *words])


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Return time of change and checksum of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {}
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = path.stat().st_mtime_ns, digest
    return found


def names(run_dir: Path) -> list[str]:
    return [window_name(key) for key in WindowFolder(run_dir / "windows").list_windows()]


def last_iteration(run_dir: Path, name: str) -> int:
    folder = WindowFolder(run_dir / "windows")
    with folder.open(next(key for key in folder.list_windows() if window_name(key) == name), 0) as opened:
        return opened.window.last_iteration


def differing(one: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Return the number of tensors of two checkpoints that differ in a bit, those of the optimizer included."""
    capsys.readouterr()
    code = inspect_checkpoint.main(["diff", str(one), str(other), "--optimizer", "--json"])
    found = len(json.loads(capsys.readouterr().out)["differences"])
    assert code == int(found > 0)
    return found


def saved(run: JobResult, iteration: int) -> Path:
    return run.run_dir / "checkpoints" / f"iter_{iteration:07d}"


def test_the_dense_state_of_a_window_has_the_bits_of_the_undisturbed_run(
    died: JobResult,
    undisturbed: JobResult,
    warm_forkserver: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, out = contents(died.run_dir), tmp_path / "dense"
    assert convert(died.run_dir, out) == 0
    printed = capsys.readouterr().out
    name = names(died.run_dir)[-1]
    at = last_iteration(died.run_dir, name)
    for text in (f"{name}, iterations", f"up to {at} in", f"{out}: complete and verified"):
        assert text in printed
    assert contents(died.run_dir) == before
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    assert Manifest.verified(out).iteration == at and not re.search(r"iteration +\d+/\d+", printed), "it has trained"
    assert differing(out, saved(undisturbed, at), capsys) == 0
    assert differing(out, saved(undisturbed, at - 1), capsys) > 400, "the comparison finds no difference at all"

    # A run that continues from it equals the undisturbed run, too: generators, schedule and position in the data.
    job = train(tmp_path / "runs", warm_forkserver, *LAYOUT, f"checkpoint.load={out}")
    assert job.exit_code == 0, job.output
    (loaded,) = of_kind(job, "checkpoint_loaded")
    assert loaded["iteration"] == at and loaded["generators_restored"]
    assert ["belongs to another run" in text for text in loaded["differences"]] == [True], "only the run differs"
    assert job.losses and job.losses == undisturbed.losses[at:]


@pytest.mark.extended
def test_an_older_window_is_named_and_damage_is_passed_over(
    died: JobResult, undisturbed: JobResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(died.run_dir, tmp_path / "copy"))
    older, newest = names(run_dir)[-2:]
    path = run_dir / "windows" / newest / rank_name(1)
    content = bytearray(path.read_bytes())
    content[-5000] ^= 1
    path.write_bytes(content)
    assert convert(run_dir, tmp_path / "none", "--window", newest) == 5
    assert f"{path}: damaged" in capsys.readouterr().err and not (tmp_path / "none").exists()
    assert convert(run_dir, tmp_path / "dense") == 0
    printed = capsys.readouterr().out
    assert f"not used: {path}: damaged" in printed and f"{older}, iterations" in printed
    assert differing(tmp_path / "dense", saved(undisturbed, last_iteration(run_dir, older)), capsys) == 0
    # The newest one is rejected by its content, as the run itself would do.
    shutil.copytree(died.run_dir / "windows" / newest, run_dir / "windows" / newest, dirs_exist_ok=True)
    RejectedWindow(start_iteration=1, generation=0, digest=digest(run_dir, newest), reason="had other results").add_to(
        run_dir
    )
    assert convert(run_dir, tmp_path / "none", "--window", newest) == 5
    assert f"{newest}: was rejected by an earlier start of the run: had other results" in capsys.readouterr().err


def digest(run_dir: Path, name: str) -> str:
    folder, manifests = WindowFolder(run_dir / "windows"), []
    for rank in range(2):
        with folder.open(next(key for key in folder.list_windows() if window_name(key) == name), rank) as opened:
            manifests.append(window_digest([opened.window.to_bytes().decode()]))
    return window_digest(manifests)


@pytest.mark.extended
def test_values_of_the_window_are_used_if_the_run_has_others_now(
    died: JobResult,
    undisturbed: JobResult,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The windows are elsewhere, on a file system from which files cannot be linked."""
    run_dir = Path(shutil.copytree(died.run_dir, tmp_path / "copy"))
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["optimizer"]["lr"] = 0.5
    config["parallel"]["expert_model_parallel_size"] = 1
    config["launch"] |= {"num_nodes": 1, "ranks_per_node": 1, "master_port": 1}
    config["snapshot"] = {"persist_url": f"file://{tmp_path / 'windows'}"}
    config["testing"]["failpoints"] = ['kill(phase="replay")']
    path.write_text(yaml.safe_dump(config))
    at = last_iteration(run_dir, names(run_dir)[-1])
    (tmp_path / "windows").mkdir()
    (run_dir / "windows").rename(tmp_path / "windows" / "copy")

    def no_link(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(window_replay.os, "link", no_link)
    assert convert(run_dir, tmp_path / "dense") == 0
    printed = capsys.readouterr().out
    assert "bytes of the window" in printed
    assert "captured with optimizer.lr=0.001; config.yaml has 0.5" in printed
    assert "captured with 2 ranks; config.yaml has 1" in printed
    assert differing(tmp_path / "dense", saved(undisturbed, at), capsys) == 0


def test_a_replay_with_other_results_writes_nothing_and_keeps_its_logs(
    died: JobResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(died.run_dir, tmp_path / "copy"))
    newest = names(run_dir)[-1]
    for rank in range(2):
        alter_vote(run_dir / "windows" / newest / rank_name(rank))
    before, out = contents(run_dir), tmp_path / "results" / "dense"
    assert convert(run_dir, out) == 5
    printed = capsys.readouterr()
    assert "other results than the iteration itself: loss=" in printed.out and "To continue this run" not in printed.out
    assert f"{out}: the job that replays the window ended:" in printed.err
    (left,) = out.parent.iterdir()
    assert str(left / "copy") in printed.err and (left / "copy" / "logs" / "rank-00000.log").exists()
    assert not (left / "copy" / "windows").exists()
    assert contents(run_dir) == before, "a window is rejected only by the run itself"


def test_a_stop_ends_the_job_and_leaves_nothing(died: JobResult, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tools.convert_checkpoint", "from-window", str(died.run_dir), str(tmp_path / "out")]
    with start(words) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("starting 2 ranks"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=120)[0]
    assert process.returncode == 130 and "stopped before the result was complete" in rest, rest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extended
def test_a_window_of_a_job_that_has_lost_a_node_is_replayed_with_its_ranks(
    warm_forkserver: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("launch.num_nodes=3", "training.global_batch_size=6", "placement=overlap_search", "recovery.min_nodes=2")
    words += ("parallel.use_distributed_optimizer=false", *SNAPSHOTS, "snapshot.persist_interval_windows=1")
    words += ("checkpoint.save_interval_iterations=1", "checkpoint.keep_last=0")
    job = train(tmp_path, warm_forkserver, *words, faults=['kill(at_iteration=5,phase="forward",rank=2)'])
    assert job.exit_code == 0 and of_kind(job, "membership_changed"), job.output
    assert convert(job.run_dir, tmp_path / "dense") == 0
    assert "captured with 2 ranks; config.yaml has 3" in capsys.readouterr().out
    at = last_iteration(job.run_dir, names(job.run_dir)[-1])
    assert differing(tmp_path / "dense", saved(job, at), capsys) == 0


def test_what_cannot_be_replayed_is_refused_before_a_job_starts(
    died: JobResult,
    undisturbed: JobResult,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_replay, "_run", lambda *_: pytest.fail("a job was started"))
    out = tmp_path / "dense"

    def refused(run_dir: Path, code: int, *words: str, to: Path = out) -> str:
        assert convert(run_dir, to, *words) == code
        assert not out.exists() and not list(tmp_path.glob(".*"))
        return capsys.readouterr().err

    windows = died.run_dir / "windows"
    assert f"{windows}: has no window_0000999" in refused(died.run_dir, 5, "--window", "window_0000999")
    assert f"{undisturbed.run_dir / 'windows'}: has no window" in refused(undisturbed.run_dir, 5)
    assert f"{tmp_path / 'config.yaml'}: must contain" in refused(tmp_path, 3)
    assert "must not exist" in refused(died.run_dir, 2, to=died.run_dir)
    with monkeypatch.context() as patch:
        patch.setattr("megatron_ft.mcore.convert.folder.free_bytes", lambda path: 10**6)
        assert "file system has only 1,000,000 free bytes" in refused(died.run_dir, 2)
    other = Path(shutil.copytree(died.run_dir, tmp_path / "other"))
    shutil.copy(undisturbed.run_dir / "run_id.json", other)
    assert "belongs to another run" in refused(other, 5, "--window", names(other)[-1])
    assert f"{other / 'windows'}: has no window that can be used" in refused(other, 5)


def test_jobs_on_other_machines_are_refused_with_the_commands_to_use(
    died: JobResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(died.run_dir, tmp_path / "copy"))
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["launch"] |= {"node_launcher": "srun", "forkserver_socket": None}
    path.write_text(yaml.safe_dump(config))
    assert convert(run_dir, tmp_path / "dense") == 2
    error = capsys.readouterr().err
    assert error.startswith("launch.node_launcher=srun: must be local")
    work, newest = tmp_path / "copy-replay" / "copy", names(run_dir)[-1]
    for line in (
        f"  mkdir -p {work}/windows\n",
        f"  cp {run_dir}/run_id.json {work}\n",
        f"  cp -r {run_dir}/windows/{newest} {work}/windows\n",
        "  python pretrain_moe.py model.name=moe_micro",
        f"The job then saves {saved_by(work, run_dir, newest)}",
        f"run.dir={work.parent}",
        "launch.node_launcher=srun",
    ):
        assert line in error
    assert not (tmp_path / "dense").exists() and not work.parent.exists()


def saved_by(work: Path, run_dir: Path, name: str) -> Path:
    return work / "checkpoints" / f"iter_{last_iteration(run_dir, name):07d}"

"""Tests the source from which a job of one rank continues if stored windows are undamaged but unusable."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.config.identity import JobIdentity
from megatron_ft.config.job import JobConfig
from megatron_ft.config.placement import PlacementConfig
from megatron_ft.errors import CheckpointError, RecoveryError
from megatron_ft.events import Record, RecoveryStarted, SnapshotProblem
from megatron_ft.mcore.snapshot.local_window import CONFIG, EXTRAS, PLACEMENT, VOTE, LocalWindow, replay_config
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer
from megatron_ft.operators import OperatorId
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan
from megatron_ft.snapshot.storage.run_settings import SETTINGS as WRITTEN_WITH
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.snapshot.storage.window_folder import RejectedWindow, WindowFolder
from megatron_ft.testing.stored_samples import sample_window

SETTINGS = {"data": "fingerprint"}
TOPOLOGY = {"data_parallel": 1}
UNITS = [Unit(operator=OperatorId(layer=0, kind="embedding")), Unit(operator=OperatorId(layer=3, kind="head"))]
PLAN = WindowPlan(slices=((UNITS[0],), (UNITS[1],)), interval_iterations=2, reason="by hand")
OWN = {"optimizer": {"optimizer.lr": 0.001}}
GOOD = {EXTRAS: "{}", PLACEMENT: "null", CONFIG: json.dumps(SETTINGS), WRITTEN_WITH: json.dumps(OWN)}
RUN_ID = "5" * 32


class OneRank:
    """``Collectives`` of a job of one rank."""

    rank, num_ranks = 0, 1

    def gather(self, record: Any) -> list[Any]:
        return [json.loads(json.dumps(record))]

    def from_first(self, record: Any) -> Any:
        return self.gather(record)[0]

    def errors(self, error: str | None) -> str | None:
        return None if error is None else f"rank 0: {error}"


def vote(iteration: int) -> dict[str, object]:
    losses = {"loss": 2.0, "aux_loss": 0.0, "z_loss": 0.0, "grad_norm": 0.5, "clip_coefficient": 1.0, "loss_scale": 1.0}
    return Vote(generation=0, iteration=iteration, found_inf=False, num_tokens=64, **losses).to_record()


def save(
    run_dir: Path, start: int, *, plan: dict[str, Any] | None = None, run_id: str = RUN_ID, **headers: str
) -> None:
    """Save a window of two slices. ``headers`` replace those of slice 0."""
    window, payload = sample_window(start, 0)
    slices = [replace(part, header={VOTE: json.dumps(vote(part.iteration))}) for part in window.slices]
    slices[0] = replace(slices[0], header={**slices[0].header, **GOOD, **headers})
    window = replace(
        window,
        run_id=run_id,
        world_size=1,
        topology=TOPOLOGY,
        plan=json.loads(json.dumps(plan or PLAN.to_json())),
        slices=slices,
    )
    write_window(run_dir / "windows", window, [memoryview(content) for content in payload])


def recovery(run_dir: Path) -> tuple[SnapshotRestorer, list[Record]]:
    """Return the recovery source of a start, and its reports."""
    records: list[Record] = []
    found = SnapshotRestorer(
        rank=0,
        node=0,
        run_dir=run_dir,
        identity=JobIdentity(run_id=RUN_ID, run_name=run_dir.name, settings=OWN),
        topology=TOPOLOGY,
        settings=SETTINGS,
        collectives=OneRank(),  # type: ignore[arg-type]
        client=None,
        folder=WindowFolder(run_dir / "windows"),
        report=records.append,
    )
    return found, records


def choose(run_dir: Path, checkpoint: Path | None = None) -> tuple[LocalWindow | None, RecoveryStarted, list[Record]]:
    found, records = recovery(run_dir)
    window = found.find(checkpoint)
    found.report_start(checkpoint, 0)
    (started,) = [record for record in records if isinstance(record, RecoveryStarted)]
    return window, started, records


def refuse(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Start a job whose replay differs from the log. Return the first iteration of the window."""
    found, records = recovery(run_dir)
    window = found.find(None)
    assert window is not None

    def differ(*_: object) -> None:
        raise RecoveryError("iteration 31 was replayed to other results")

    monkeypatch.setattr(found, "_carry_out", differ)
    with pytest.raises(RecoveryError, match="replayed to other results"):
        found.replay(None, window)  # type: ignore[arg-type]
    assert [record.what for record in records if isinstance(record, SnapshotProblem)] == ["replay"]
    return window.window.start_iteration


def test_a_refused_window_is_not_chosen_by_later_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 20)
    save(tmp_path, 30)
    assert refuse(tmp_path, monkeypatch) == 30
    window, chosen, _ = choose(tmp_path)
    assert window is not None and window.window.start_iteration == 20
    rejected = "persisted window of iteration 30 was rejected by an earlier start: "
    reason = rejected + "iteration 31 was replayed to other results"
    assert chosen.declined == (reason,)
    assert refuse(tmp_path, monkeypatch) == 20
    assert [window.start_iteration for window in RejectedWindow.read_all(tmp_path)] == [30, 20]
    window, chosen, _ = choose(tmp_path, tmp_path / "iter_0000010")
    assert window is None and (chosen.strategy, chosen.iteration, len(chosen.declined)) == ("checkpoint", 10, 2)


def test_where_refused_windows_leave_nothing_the_job_stops_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 30)
    refuse(tmp_path, monkeypatch)
    found, _ = recovery(tmp_path)
    assert found.find(None) is None
    (reason,) = found.unusable
    assert reason.startswith("persisted window of iteration 30 was rejected by an earlier start: ")
    assert found.chosen.kind == "nothing"


def test_windows_that_cannot_be_used_are_noted_where_nothing_else_is_left(tmp_path: Path) -> None:
    found, _ = recovery(tmp_path)
    assert found.find(None) is None and found.unusable == (), "an empty folder"
    save(tmp_path, 20, **{CONFIG: json.dumps({"data": "other"})})
    found, _ = recovery(tmp_path)
    assert found.find(None) is None
    (reason,) = found.unusable
    assert "was captured with data='other'" in reason
    found, _ = recovery(tmp_path)
    assert found.find(tmp_path / "iter_0000010") is None and found.unusable == (), "the checkpoint serves"


@pytest.mark.parametrize("damage", ["a byte", "cut off", "no file"])
def test_a_damaged_window_counts_and_one_that_was_never_written_does_not(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 20)
    (path,) = (tmp_path / "windows").glob("*/rank-00000.window")
    content = bytearray(path.read_bytes())
    content[-1 if damage == "a byte" else 20] ^= 1
    path.write_bytes(content[:100] if damage == "cut off" else content)
    if damage == "no file":
        path.unlink()
    found, _ = recovery(tmp_path)
    assert found.find(None) is None
    assert [path.name in reason for reason in found.unusable] == ([] if damage == "no file" else [True])


def test_a_window_captured_again_under_the_same_name_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 20)
    save(tmp_path, 30)
    refuse(tmp_path, monkeypatch)
    found, _ = recovery(tmp_path)
    found.find(None)
    found.set_aside_later(21, is_new_job=False)
    save(tmp_path, 30, **{EXTRAS: '{"iteration": 30}'})
    window, chosen, _ = choose(tmp_path)
    assert window is not None and window.window.start_iteration == 30 and not chosen.declined


@pytest.mark.parametrize(
    "damage",
    [
        {"plan": {"slices": [[1, 2], [3]]}},
        {"plan": {**PLAN.to_json(), "slices": PLAN.to_json()["slices"][:1]}},
        {EXTRAS: "{"},
        {EXTRAS: "null"},
        {PLACEMENT: "}"},
        {VOTE: '{"iteration": 30}'},
    ],
)
def test_a_plan_or_header_that_cannot_be_read_costs_no_restart(tmp_path: Path, damage: dict[str, Any]) -> None:
    save(tmp_path, 20)
    save(tmp_path, 30, **damage)
    window, chosen, records = choose(tmp_path)
    assert window is not None and window.window.start_iteration == 20
    assert "window of iteration 30" in chosen.declined[0]
    assert [record.what for record in records if isinstance(record, SnapshotProblem)] == ["load persisted"]
    assert not RejectedWindow.read_all(tmp_path)


def test_what_auto_came_to_is_compared() -> None:
    config = JobConfig()
    assert (config.training.device, config.training.transformer_impl) == ("auto", "auto")
    cpu = replay_config(config, "data", device="cpu", transformer_impl="local")
    gpu = replay_config(config, "data", device="cuda", transformer_impl="transformer_engine")
    changed = {"training.device", "training.transformer_impl", "parallel.device_backend"}
    assert {key for key in cpu if cpu[key] != gpu[key]} == changed


def test_replays_compare_the_shares() -> None:
    even = JobConfig(placement=PlacementConfig(shares="even"))
    settings = [replay_config(each, "data", device="cpu", transformer_impl="local") for each in (JobConfig(), even)]
    assert {key for key in settings[0] if settings[0][key] != settings[1][key]} == {"placement.shares"}


def test_windows_of_another_run_are_not_used_and_set_aside(tmp_path: Path) -> None:
    save(tmp_path, 20)
    save(tmp_path, 30, run_id="6" * 32)
    window, chosen, _ = choose(tmp_path)
    assert window is not None and window.window.start_iteration == 20
    assert "persisted window of iteration 30: belongs to another run" in chosen.declined[0]
    found, _ = recovery(tmp_path)
    found.find(None)
    found.set_aside_later(31, is_new_job=False)
    names = sorted(path.name for path in (tmp_path / "windows").iterdir())
    assert names == ["superseded_window_0000030", "window_0000020"]


def test_newer_windows_of_this_run_with_other_settings_end_the_start(tmp_path: Path) -> None:
    save(tmp_path, 20)
    save(tmp_path, 30, **{WRITTEN_WITH: json.dumps({"optimizer": {"optimizer.lr": 0.5}})})
    found, _ = recovery(tmp_path)
    with pytest.raises(CheckpointError, match=r"0000030.*captured with other settings.*optimizer\.lr: was 0\.5, now"):
        found.find(None)
    window, _, _ = choose(tmp_path, tmp_path / "iter_0000040")
    assert window is None, "a checkpoint is newer than the window"


@pytest.mark.parametrize("text", ["{", "3", "[]", '{"optimizer": 3}'])
def test_a_window_that_does_not_say_its_settings_is_passed_over(tmp_path: Path, text: str) -> None:
    save(tmp_path, 20)
    save(tmp_path, 30, **{WRITTEN_WITH: text})
    window, _, records = choose(tmp_path)
    assert window is not None and window.window.start_iteration == 20
    (problem,) = [record for record in records if isinstance(record, SnapshotProblem)]
    assert "its record of the job's settings is missing or damaged" in problem.error

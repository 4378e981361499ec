"""Tests that a start at iteration 0 needs a key if there is unusable saved state, and none in an empty folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.config.identity import JobIdentity
from megatron_ft.config.job import JobConfig, RecoveryConfig, RunConfig
from megatron_ft.control.node.worker_client import InProcessClient, RankContext, StopFlag
from megatron_ft.errors import CheckpointError, UnreadableError
from megatron_ft.events import Record, RecoveryStarted
from megatron_ft.mcore.checkpoint.files import CheckpointFinder
from megatron_ft.mcore.recovery.restart import _check_start_over, _newest_iteration, select_restore_source
from megatron_ft.mcore.snapshot.local_window import CONFIG
from tests.helpers.disk import fail_to_read
from tests.unit.mcore.snapshot.test_restorer import OWN, OneRank, recovery, save
from tests.unit.snapshot.storage.conftest import make_checkpoint

AUTO = RunConfig(name="run", resume="auto")


def start(
    run_dir: Path, run: RunConfig = AUTO, *, generation: int = 0, strategies: list[str] | None = None
) -> tuple[str, list[Record]]:
    """Return the strategy by which a rank continues, and the reports."""
    found, records = recovery(run_dir)
    damage: list[Any] = []
    identity = JobIdentity(run_id="run-1", run_name="first", settings=OWN)  # as ``make_checkpoint`` writes it
    finder = CheckpointFinder(OneRank(), identity, lambda *about: damage.append(about))  # type: ignore[arg-type]
    has_state = any((run_dir / name).is_dir() for name in ("checkpoints", "windows"))
    context = RankContext(
        rank=0,
        world_size=1,
        local_rank=0,
        node=0,
        num_nodes=1,
        generation=generation,
        master_addr="127.0.0.1",
        master_port=1,
        run_dir=run_dir,
        resume_from=run_dir / "checkpoints" if has_state else None,
        worker=InProcessClient(lambda record: None, stop=StopFlag()),
    )
    config = replace(JobConfig(), run=run, recovery=RecoveryConfig(strategies=strategies))
    source, window = select_restore_source(config, context, finder, found)  # type: ignore[arg-type]
    return ("rollback" if window else "checkpoint" if source else "start_over"), records


def damaged_checkpoint(run_dir: Path, iteration: int) -> None:
    make_checkpoint(run_dir / "checkpoints" / f"iter_{iteration:07d}", iteration)
    path = run_dir / "checkpoints" / f"iter_{iteration:07d}" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def test_an_empty_folder_just_starts(tmp_path: Path) -> None:
    assert start(tmp_path) == ("start_over", [])
    (tmp_path / "checkpoints").mkdir()
    assert start(tmp_path)[0] == "start_over"
    (tmp_path / "checkpoints" / "iter_0000005").mkdir()
    assert start(tmp_path)[0] == "start_over", "a save that never finished is no state"


@pytest.mark.parametrize("generation", [0, 1])
def test_windows_of_other_settings_are_not_started_over_in_silence(tmp_path: Path, generation: int) -> None:
    save(tmp_path, 20, **{CONFIG: json.dumps({"data": "other"})})
    with pytest.raises(CheckpointError, match=r"was captured with data='other'.*run\.start_over=true"):
        start(tmp_path, generation=generation)
    source, records = start(tmp_path, replace(AUTO, start_over=True), generation=generation)
    assert source == "start_over"
    assert [record.strategy for record in records if isinstance(record, RecoveryStarted)] == ["start_over"]


def test_damaged_checkpoints_are_not_started_over_by_a_second_start_either(tmp_path: Path) -> None:
    damaged_checkpoint(tmp_path, 5)
    for words in (
        r"damaged_iter_0000005: .*__0_0\.distcp",
        "damaged_iter_0000005: damaged, renamed by an earlier start",
    ):
        with pytest.raises(CheckpointError, match=words):
            start(tmp_path)
    assert start(tmp_path, replace(AUTO, start_over=True))[0] == "start_over"
    make_checkpoint(tmp_path / "checkpoints" / "iter_0000003", 3)
    assert start(tmp_path)[0] == "checkpoint"


@pytest.mark.parametrize(("iteration", "source"), [(10, "rollback"), (40, None)])
def test_only_a_newer_window_replaces_a_checkpoint_that_cannot_be_read(
    tmp_path: Path, iteration: int, source: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 20)
    checkpoint = tmp_path / "checkpoints" / f"iter_{iteration:07d}"
    make_checkpoint(checkpoint, iteration)
    fail_to_read(monkeypatch, "__0_0.distcp", times=2)
    if source is None:
        with pytest.raises(UnreadableError, match="Input/output error"):
            start(tmp_path, replace(AUTO, start_over=True))
    else:
        assert start(tmp_path)[0] == source
    assert checkpoint.is_dir()


def test_state_that_can_be_used_is_used_whatever_the_key_says(tmp_path: Path) -> None:
    save(tmp_path, 20)
    assert start(tmp_path, replace(AUTO, start_over=True))[0] == "rollback"


def test_resume_must_names_what_it_could_not_use(tmp_path: Path) -> None:
    damaged_checkpoint(tmp_path, 5)
    with pytest.raises(
        CheckpointError, match=r"run\.resume=must: .* has no usable checkpoint, .*: .*damaged_iter_0000005"
    ):
        start(tmp_path, replace(AUTO, resume="must"))


def test_iterations_that_were_never_saved_are_named(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "metrics", "iteration": iteration}) for iteration in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "met']))
    source, records = start(tmp_path)
    assert source == "start_over"
    (chosen,) = [record for record in records if isinstance(record, RecoveryStarted)]
    assert "has records of iterations up to 3, but no saved state" in chosen.declined[0]
    assert _newest_iteration(tmp_path / "none") == 0


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"piece 7; and 12 more\. Repair"):
        _check_start_over([f"piece {index}" for index in range(20)], run_dir=tmp_path, start_over=False)
    _check_start_over([], run_dir=tmp_path, start_over=False)


def test_a_restart_loads_no_state_whose_strategy_is_not_chosen(tmp_path: Path) -> None:
    save(tmp_path, 20)
    make_checkpoint(tmp_path / "checkpoints" / "iter_0000003", 3)
    assert start(tmp_path, generation=1)[0] == "rollback"
    source, records = start(tmp_path, generation=1, strategies=["checkpoint"])
    (chosen,) = [record for record in records if isinstance(record, RecoveryStarted)]
    assert (source, chosen.strategy, chosen.iteration) == ("checkpoint", "checkpoint", 3)
    assert chosen.declined == ("window of iteration 20: not chosen: recovery.strategies=[checkpoint]",)
    assert start(tmp_path, strategies=["checkpoint"])[0] == "rollback", "a user continues the run from any state"


def test_a_restart_does_not_start_over_because_a_strategy_is_not_chosen(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoints" / "iter_0000003", 3)
    with pytest.raises(CheckpointError, match=r"iter_0000003: not chosen: recovery\.strategies=\[rollback\]"):
        start(tmp_path, generation=1, strategies=["rollback"])
    save(tmp_path, 20)
    assert start(tmp_path, generation=1, strategies=["rollback"])[0] == "rollback"

"""Tests the records that a batch job keeps of its launchers, and what it reads from a run's reports."""

import json
from pathlib import Path

import pytest

from megatron_ft.control.slurm.attempts import RunAttempts, Witness
from megatron_ft.errors import ControlError
from megatron_ft.events import RankFailed, Record, RunFinished, RunStopped
from megatron_ft.planning.recovery.job_attempts import Asked, Attempt
from megatron_ft.telemetry.sinks.jsonl import JsonlSink
from tests.helpers.disk import note_steps

ATTEMPT = Attempt(
    job_id="17", hosts=("a", "b"), exit_code=-9, asked=Asked.TO_GO_ON_LATER, iteration=4, lost_hosts=("b", "b")
)
LOST = '{"kind": "node_lost", "node": 1, "reason": "silent"}\n'


def test_what_an_attempt_reports_is_read_also_behind_half_a_line_of_the_one_before(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text('{"kind": "node_lost", "node": 0, "reason": "silent"}\n{"kind": "window_comm')
    witness = Witness.begin(tmp_path, ("a", "b"))
    sink = JsonlSink(log, metrics=False)
    (truncated,) = sink.take_reports()
    sink.write(truncated)
    with log.open("a") as file:
        file.write(LOST)
    assert witness.lost_hosts() == ("b",)


def test_a_failure_of_which_no_node_is_known_is_held_against_none(tmp_path: Path) -> None:
    events = [RankFailed(rank=3, first=True), RankFailed(rank=2, node=1, first=True), RankFailed(rank=1, node=0)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event.to_record()) + "\n" for event in events))
    assert Witness(tmp_path, ("a", "b"), 0).failed_hosts() == ("b",)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (RunFinished(exit_code=0, reason="done"), True),
        (RunFinished(exit_code=0, reason="done", is_complete=False), False),
        (RunStopped(exit_code=130, reason="asked"), False),
    ],
)
def test_only_a_report_makes_a_run_complete(tmp_path: Path, event: Record, expected: bool) -> None:
    assert not Witness(tmp_path, (), 0).is_complete()
    (tmp_path / "events.jsonl").write_text(json.dumps(event.to_record()) + "\n")
    assert Witness(tmp_path, (), 0).is_complete() == expected
    assert not Witness.begin(tmp_path, ()).is_complete(), "an earlier attempt reported this"


def test_attempts_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert RunAttempts(tmp_path).read() == []
    RunAttempts(tmp_path).add(ATTEMPT)
    RunAttempts(tmp_path).add(ATTEMPT)
    assert RunAttempts(tmp_path).read() == [ATTEMPT, ATTEMPT]
    path = tmp_path / "slurm" / "attempts.jsonl"
    path.write_text(path.read_text() + '{"job_id": "18"}\n')
    with pytest.raises(ControlError, match=r"attempts\.jsonl: damaged"):
        RunAttempts(tmp_path).read()


def test_half_an_attempt_spoils_no_later_one(tmp_path: Path) -> None:
    RunAttempts(tmp_path).add(ATTEMPT)
    path = tmp_path / "slurm" / "attempts.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:20])
    RunAttempts(tmp_path).add(ATTEMPT)
    assert RunAttempts(tmp_path).read() == [ATTEMPT, ATTEMPT]


def test_the_end_is_that_of_this_job(tmp_path: Path) -> None:
    assert RunAttempts(tmp_path).read_end("17") is None
    RunAttempts(tmp_path).leave_marker("16", exit_code=7, reason="because", is_final=True)
    assert RunAttempts(tmp_path).read_end("17") is None
    RunAttempts(tmp_path).leave_marker("17", exit_code=0, reason="because", is_final=True)
    assert (RunAttempts(tmp_path).read_end("16"), RunAttempts(tmp_path).read_end("17")) == (7, 0)
    for content in ("", "[]", "{}", '{"exit_code": null}'):
        (tmp_path / "slurm" / "17.json").write_text(content)
        with pytest.raises(ControlError, match=r"17\.json: damaged"):
            RunAttempts(tmp_path).read_end("17")


def test_what_a_job_leaves_is_found_after_the_death_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, run = note_steps(monkeypatch), f"fsync {tmp_path.name}"
    RunAttempts(tmp_path).add(ATTEMPT)
    assert steps == [run, "fsync attempts.jsonl", "fsync slurm"]
    steps.clear()
    RunAttempts(tmp_path).leave_marker("17", exit_code=0, reason="because", is_final=True)
    assert steps == [run, "fsync 17.json", "rename 17.json", "fsync slurm"]

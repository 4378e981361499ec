"""Tests reading a run's folder: incomplete last lines are ignored, and damage is named."""

import json

import pytest

from megatron_ft.errors import DataError
from megatron_ft.telemetry.report.files import Decision
from megatron_ft.testing.made_up_runs import ZERO, MadeUpRun, localized, next_membership


def test_decisions_are_read_without_what_a_page_does_not_tell(run: MadeUpRun) -> None:
    run.decide(6.4, 0, "killed", next=next_membership(1, (0, None), (0, 4)), lost_nodes=[1], joined_nodes=[4])
    run.decide(9.0, 1, "killed again", declined="no copy of expert 3", lost_nodes=[4])
    first = Decision(
        generation=0,
        time_unix_seconds=ZERO + 6.4,
        reason="killed",
        lost_nodes=(1,),
        joined_nodes=(4,),
        previous_ranks=(0, None),
        nodes=(0, 4),
    )
    declined, about = "no copy of expert 3", {"time_unix_seconds": ZERO + 9.0, "lost_nodes": (4,)}
    assert run.files().decisions == (first, Decision(generation=1, reason="killed again", declined=declined, **about))


@pytest.mark.parametrize("file", ["events.jsonl", "metrics.jsonl", "decisions.jsonl"])
def test_a_line_that_is_being_written_is_left_out(run: MadeUpRun, file: str) -> None:
    localized(run)
    whole = run.files()
    with (run.path / file).open("a") as lines:
        lines.write('{"kind":"metrics","iter')
    assert run.files() == whole


@pytest.mark.parametrize("file", ["events.jsonl", "metrics.jsonl", "decisions.jsonl"])
@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"kind":"no kind"}', '{"generation":"one"}', '{"iteration":1' + "0" * 400]
)
def test_a_damaged_line_in_the_middle_is_one_error_with_its_place(run: MadeUpRun, file: str, damage: str) -> None:
    localized(run)
    lines = (run.path / file).read_text().splitlines()
    (run.path / file).write_text("\n".join([lines[0] if lines else "", damage, *lines[1:]]) + "\n")
    with pytest.raises(DataError, match=rf"run_dir=.*{file.replace('.', chr(92) + '.')}:2: "):
        run.files()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generation": None}, "decision.generation"),
        ({"lost_nodes": ["one"]}, "decision.lost_nodes"),
        ({"next": []}, "decision.next"),
        ({"next": {"nodes": [0]}}, "decision.previous_ranks: is required"),
        ({"next": {"nodes": [0], "previous_ranks": 0}}, "decision.previous_ranks=0: must be list of int"),
        ({"next": {"nodes": [0], "previous_ranks": ["0"]}}, "decision.previous_ranks\\[0\\]='0'"),
    ],
)
def test_a_decision_of_another_shape_is_refused(change: dict[str, object], message: str) -> None:
    line = {"generation": 0, "time_unix_seconds": 1.0, "reason": ""} | change
    with pytest.raises(ValueError, match=message):
        Decision.of(line)


def test_figures_that_nothing_counts_to_are_refused(run: MadeUpRun) -> None:
    record = {"kind": "recovery_decided", "generation": 1, "rung": "replicas", "iteration": 10**30}
    (run.path / "events.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match="events.jsonl:1: iteration: must be an integer of at most 64 bits"):
        run.files()


@pytest.mark.parametrize("missing", ["events.jsonl", "metrics.jsonl"])
def test_a_folder_that_is_no_run_is_refused(run: MadeUpRun, missing: str) -> None:
    (run.path / missing).unlink()
    with pytest.raises(DataError, match="must be the folder of a run with intact files metrics.jsonl and events.jsonl"):
        run.files()

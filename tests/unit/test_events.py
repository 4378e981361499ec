"""Tests records: conversion to strict JSON and back, registry, refusals."""

import dataclasses
import json
import math

import pytest

from megatron_ft import events
from megatron_ft.records import OtherRecord, Record
from tests.helpers.example_records import example_of
from tools.document_telemetry import field_meanings


@pytest.mark.parametrize("kind", events.RECORDS.values(), ids=events.RECORDS)
def test_round_trip_through_strict_json(kind: type[events.Record]) -> None:
    record = example_of(kind)
    line = json.dumps(record.to_record(), allow_nan=False)
    assert events.Record.from_record(json.loads(line)) == record
    assert kind.from_record(json.loads(line)) == record


@pytest.mark.parametrize("kind", events.RECORDS.values(), ids=events.RECORDS)
def test_only_required_fields(kind: type[events.Record]) -> None:
    record = example_of(kind).to_record()
    if kind is events.Metrics:
        return
    required = events.schema()["records"][kind.kind]["fields"]
    minimal = {name: value for name, value in record.items() if name == "kind" or required[name]["required"]}
    assert events.Record.from_record(minimal).to_record().items() >= minimal.items()
    for name in minimal.keys() - {"kind"}:
        with pytest.raises(ValueError, match=f"{kind.kind}.{name}: is required"):
            events.Record.from_record({key: value for key, value in minimal.items() if key != name})


def test_registry_has_every_class_under_its_own_name() -> None:
    classes = {
        name
        for name, value in vars(events).items()
        if isinstance(value, type) and issubclass(value, events.Record) and value is not events.Record
    }
    assert {found.__name__ for found in events.RECORDS.values()} == classes
    assert events.RECORDS["checkpoint_saved"] is events.CheckpointSaved
    assert events.schema()["records"].keys() == events.RECORDS.keys()
    assert json.dumps(events.schema(), allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 5e-324, 0.1 + 0.2, -0.0, 1.7976931348623157e308])
def test_every_float_survives_exactly(value: float) -> None:
    line = json.dumps(events.Evaluation(iteration=1, loss=value).to_record(), allow_nan=False)
    back = events.Evaluation.from_record(json.loads(line))
    assert repr(back.loss) == repr(value)


def test_metrics_lie_flat_and_keep_integers() -> None:
    record = events.Metrics(iteration=4, values={"loss": math.nan, "tokens": 2048}).to_record()
    assert record == {"kind": "metrics", "iteration": 4, "loss": "NaN", "tokens": 2048}
    assert type(events.Metrics.from_record(record).values["tokens"]) is int


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "kind=None"),
        ({"kind": "lunch"}, "kind='lunch'"),
        ({"kind": ["metrics"]}, "kind="),
        ({"kind": "evaluation", "iteration": 1}, "evaluation.loss: is required"),
        ({"kind": "evaluation", "iteration": 1.0, "loss": 1.0}, "evaluation.iteration=1.0: must be int"),
        ({"kind": "evaluation", "iteration": True, "loss": 1.0}, "evaluation.iteration=True: must be int"),
        ({"kind": "evaluation", "iteration": 1, "loss": "low"}, "evaluation.loss='low'"),
        ({"kind": "evaluation", "iteration": 1, "loss": True}, "evaluation.loss=True"),
        ({"kind": "evaluation", "iteration": 1, "loss": 1.0, "mood": 1}, "evaluation.mood: is not a field"),
        ({"kind": "expert_load", "iteration": 1, "layers": [[1, 2.5]]}, "expert_load.layers[0][1]=2.5"),
        ({"kind": "expert_load", "iteration": 1, "layers": 7}, "must be list of list of int"),
        ({"kind": "metrics", "loss": 1.0}, "metrics.iteration: is required"),
        ({"kind": "metrics", "iteration": 1, "loss": [1.0]}, "loss="),
    ],
)
def test_what_does_not_fit_is_refused(record: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        events.Record.from_record(record)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ({"kind": "lunch_served", "menu": "soup", "guests": [1, 2]}, 'lunch served: menu="soup", guests=[1, 2]'),
        ({"kind": "lunch_served", "time_unix_seconds": 12.5}, "lunch served"),
        ({"kind": "lunch_served", "menu": "x" * 300}, 'lunch served: menu="' + "x" * 194 + "..."),
    ],
)
def test_a_kind_of_another_package_is_kept(line: dict[str, object], shown: str) -> None:
    found = Record.read(line)
    assert found == OtherRecord(
        name="lunch_served",
        time_unix_seconds=line.get("time_unix_seconds"),  # type: ignore[arg-type]
        values={name: value for name, value in line.items() if name not in ("kind", "time_unix_seconds")},
    )
    assert (found.kind, found.to_record(), found.describe()) == ("lunch_served", line, events.Note("info", shown))
    assert "lunch_served" not in events.RECORDS and "other_record" not in events.RECORDS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "kind=None"),
        ({"kind": 7}, "kind=7"),
        ({"kind": "no kind"}, "kind='no kind'"),
        ({"kind": "x" * 101}, "kind='xxx"),
        ({"kind": "lunch_served", "time_unix_seconds": "noon"}, "lunch_served.time_unix_seconds='noon'"),
        ({"kind": "evaluation", "iteration": 1}, "evaluation.loss: is required"),
    ],
)
def test_a_line_that_is_no_record_is_refused(line: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Record.read(line)
    assert message in str(caught.value)


def test_a_subclass_takes_only_its_own_kind() -> None:
    with pytest.raises(ValueError, match="must be one of evaluation"):
        events.Evaluation.from_record({"kind": "ranks_ready", "seconds": 1.0})


def test_records_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        events.RanksReady(seconds=1.0).seconds = 2.0  # type: ignore[misc]


def test_every_field_has_a_docstring() -> None:
    for kind, found in events.RECORDS.items():
        meanings = field_meanings(events.Record) | field_meanings(found)
        bare = [field.name for field in dataclasses.fields(found) if not meanings.get(field.name)]
        assert bare == [], f"{kind} has fields without a docstring"


@pytest.mark.parametrize("kind", events.RECORDS.values(), ids=events.RECORDS)
def test_every_kind_has_its_own_line(kind: type[events.Record]) -> None:
    assert "describe" in vars(kind), "each event describes itself"
    note = example_of(kind).describe()
    assert note is None or (note.level in ("info", "good", "warning", "bad") and "\n" not in note.text and note.text)
    shown_otherwise = {"metrics", "expert_load", "state_digest", "window_committed", "stage_recovery"}
    shown_otherwise |= {"pipeline_idle"}
    assert (note is None) == (kind.kind in shown_otherwise)


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ({"kind": "log_healed", "file": "f", "num_dropped_bytes": 3}, {"kind": "log_truncated"}),
        (
            {"kind": "recovery_decided", "generation": 2, "rung": "replicas", "iteration": 5, "declined": ["x"]},
            {
                "kind": "recovery_started",
                "generation": 2,
                "strategy": "living_state",
                "iteration": 5,
                "declined": ["x"],
            },
        ),
        (
            {"kind": "recovery_chosen", "source": "persisted", "iteration": 5},
            {"kind": "recovery_started", "generation": 0, "strategy": "rollback", "source": "persisted"},
        ),
        (
            {"kind": "recovery_chosen", "source": "checkpoint", "iteration": 5},
            {"kind": "recovery_started", "generation": 0, "strategy": "checkpoint"},
        ),
        (
            {"kind": "recovery_started", "generation": 1, "strategy": "localized", "iteration": 5},
            {"kind": "recovery_started", "generation": 1, "strategy": "localized_replay"},
        ),
    ],
)
def test_records_of_version_1_are_read(former: dict[str, object], now: dict[str, object]) -> None:
    assert events.Record.from_record(former).to_record().items() >= {**now}.items()


def test_a_damaged_record_of_version_1_is_refused() -> None:
    with pytest.raises(ValueError, match="recovery_started.strategy: is required"):
        events.Record.from_record({"kind": "recovery_chosen", "iteration": 5})


def test_plans_of_snapshots_state_captured_bytes_and_why_they_are_new() -> None:
    sizes = {"window_bytes": 900, "dense_bytes": 900, "host_bytes": 0}
    plan = events.SnapshotPlanned(iteration=1, window_iterations=1, interval_iterations=1, reason="", **sizes)
    assert plan.describe().text == "snapshots: windows of 1 iteration, at most 900 B per rank"
    plan = dataclasses.replace(plan, window_iterations=2, captured_bytes=300, cause="the operators have changed")
    assert plan.describe().text == (
        "snapshots: windows of 2 iterations, which capture 300 B of 900 B on the largest rank; planned again because "
        "the operators have changed"
    )


def test_a_recovery_without_replayed_iterations_does_not_count_them() -> None:
    replayed = events.WindowReplayed(iteration=8, start_iteration=8, num_iterations=0, seconds=1.0)
    assert replayed.describe().text == "loaded the window of iteration 8 in 1.00 s"
    more = dataclasses.replace(replayed, iteration=9, num_iterations=1)
    assert more.describe().text == "replayed 1 iteration up to 9 in 1.00 s"
    stage = dataclasses.replace(example_of(events.StageRecovery), role="replays", iteration=8, num_iterations=0)
    note = stage.describe()
    assert note is not None and "loaded the window of iteration 8" in note.text and "replayed" not in note.text


def test_the_start_names_the_folder_of_the_run() -> None:
    started = events.RunStarted(run_name="x", model="moe_tiny", world_size=1, run_dir="runs/x")
    assert started.describe().text == "x: moe_tiny, 1 rank; folder of the run: runs/x"

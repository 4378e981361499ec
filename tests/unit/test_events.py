"""Records: strict JSON round trip, registry, refusals."""

import dataclasses
import json
import math
import types
import typing

import pytest

from megatron_ft import events, membership_events, records, snapshot_events


def example(hint: object) -> object:
    """Some value of the type ``hint``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return example(arguments[0])
    if origin is tuple:
        return (example(arguments[0]), example(arguments[0]))
    if origin is dict:
        return {"key": example(arguments[1])}
    return {int: 3, float: 0.1 + 0.2, str: "text", bool: True}[hint]


def full(kind: type[events.Record]) -> events.Record:
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: example(hints[field.name]) for field in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", events.RECORDS.values(), ids=events.RECORDS)
def test_round_trip_through_strict_json(kind: type[events.Record]) -> None:
    record = full(kind)
    line = json.dumps(record.to_record(), allow_nan=False)
    assert events.Record.from_record(json.loads(line)) == record
    assert kind.from_record(json.loads(line)) == record


@pytest.mark.parametrize("kind", events.RECORDS.values(), ids=events.RECORDS)
def test_only_required_fields(kind: type[events.Record]) -> None:
    record = full(kind).to_record()
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
        ({"kind": "evaluation", "iteration": 1, "loss": 1.0, "mood": 1}, "evaluation.mood: is no field"),
        ({"kind": "expert_load", "iteration": 1, "layers": [[1, 2.5]]}, "expert_load.layers=2.5"),
        ({"kind": "expert_load", "iteration": 1, "layers": 7}, "must be list of list of int"),
        ({"kind": "metrics", "loss": 1.0}, "metrics.iteration: is required"),
        ({"kind": "metrics", "iteration": 1, "loss": [1.0]}, "loss="),
    ],
)
def test_what_does_not_fit_is_refused(record: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        events.Record.from_record(record)
    assert message in str(caught.value)


def test_a_subclass_takes_only_its_own_kind() -> None:
    with pytest.raises(ValueError, match="must be one of evaluation"):
        events.Evaluation.from_record({"kind": "ranks_ready", "seconds": 1.0})


def test_records_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        events.RanksReady(seconds=1.0).seconds = 2.0  # type: ignore[misc]


def test_every_field_has_a_docstring() -> None:
    from megatron_ft.telemetry.page import field_meanings

    meanings = (
        field_meanings(records)
        | field_meanings(events)
        | field_meanings(membership_events)
        | field_meanings(snapshot_events)
    )
    for kind, found in events.RECORDS.items():
        for field in dataclasses.fields(found):
            owner = found.__name__ if field.name in meanings[found.__name__] else "Record"
            assert meanings[owner].get(field.name), f"{kind}.{field.name} has no docstring"

"""Tests that any valid records in any order give a well-formed page."""

import dataclasses
import types
import typing

from hypothesis import given, settings
from hypothesis import strategies as some

from megatron_ft import events
from megatron_ft.events import Metrics, Record
from megatron_ft.telemetry.report.files import Decision, RunFiles
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.page import render
from megatron_ft.testing.made_up_runs import ZERO

from .conftest import Parts, drawings

LARGE = 2**63 - 1
INTEGERS = some.one_of(some.integers(-1, 4), some.sampled_from([-LARGE, LARGE, 10**12]))
ODD = some.sampled_from([float("nan"), float("inf"), -1.0, 0.0, 1e300, 1e11])
FLOATS = some.one_of(some.floats(ZERO, ZERO + 20.0), some.floats(0.0, 5.0), ODD)
WORDS = some.one_of(some.text(max_size=4), some.sampled_from(["membership", "replays", "serves", "waits", "</svg>"]))


def values(hint: object) -> some.SearchStrategy[object]:
    """Draw values of a field's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return some.one_of(some.none(), values(next(inner for inner in arguments if inner is not types.NoneType)))
    if origin is tuple:
        return some.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return some.dictionaries(some.sampled_from(["loss", "iteration_seconds"]), values(arguments[1]), max_size=2)
    return {int: INTEGERS, float: FLOATS, str: WORDS, bool: some.booleans()}[typing.cast(type, hint)]


def instances(kind: type) -> some.SearchStrategy[typing.Any]:
    """Draw instances of a dataclass."""
    hints = typing.get_type_hints(kind)
    return some.builds(kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)})


TOLD = [
    events.RunStarted,
    events.RanksReady,
    events.RanksRestarted,
    events.RankFailed,
    events.NodeLost,
    events.RecoveryStarted,
    events.MembershipChanged,
    events.StageRecovery,
    events.WindowReplayed,
    events.CheckpointLoaded,
    events.PlacementInForce,
    events.ExpertLoad,
    events.AlertRaised,
    events.AlertCleared,
    events.IterationSkipped,
    events.WindowCommitted,
    events.CheckpointSaved,
    events.Evaluation,
    events.RunStopped,
    events.RunFinished,
]
RECORDS: some.SearchStrategy[list[Record]] = some.lists(some.one_of([instances(kind) for kind in TOLD]), max_size=12)


@settings(deadline=None, max_examples=50)
@given(RECORDS, some.lists(instances(Metrics), max_size=6), some.lists(instances(Decision), max_size=2))
def test_any_records_make_a_page(records: list[Record], metrics: list[Metrics], decisions: list[Decision]) -> None:
    files = RunFiles(folder="run", events=tuple(records), metrics=tuple(metrics), decisions=tuple(decisions))
    page = render(RunReport.of(files))
    page.encode("utf-8")
    Parts(page)
    for drawing in drawings(page):
        figures = [value for shape in drawing.iter() for name, value in shape.attrib.items() if name in ("x", "y", "d")]
        assert not any("nan" in value or "inf" in value for value in figures)

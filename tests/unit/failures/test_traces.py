"""Tests traces: which are read, which are refused with their line, and the schedules that result."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ft.errors import ConfigError, DataError
from megatron_ft.failures.schedule import FailureSchedule, MembershipEvent
from megatron_ft.failures.traces import MembershipTrace

REAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces" / "aws_p3_bamboo.csv"
needs_real = pytest.mark.skipif(not REAL.exists(), reason="needs the trace in ../shared/data/traces")


def trace(*rows: str, end: str = "\r\n") -> MembershipTrace:
    return MembershipTrace.parse("t.csv", "".join(row + end for row in rows).encode())


@needs_real
def test_the_real_trace_has_what_its_readme_says() -> None:
    found = MembershipTrace.read(REAL)
    schedule = found.schedule(most_nodes=32)
    assert len(found.instants[0].added) == schedule.num_initial_nodes == 18
    assert (schedule.num_leaves, schedule.num_joins, schedule.num_ignored_arrivals) == (167, 159, 0)
    assert schedule.most_lost_at_once == 6 and max(schedule.num_nodes_after()) == 32, "a peak of 32, up to 6 at once"
    assert sum(len(instant.added) + len(instant.removed) for instant in found.instants) == 344


@needs_real
def test_the_real_trace_is_clipped_scaled_and_put_on_ten_nodes() -> None:
    schedule = MembershipTrace.read(REAL).schedule(most_nodes=10, minutes=80, scale=1 / 20)
    assert schedule.num_initial_nodes == 10 and schedule.duration_seconds == 240
    assert schedule.events[0] == MembershipEvent(seconds=102.0, leaves=(2,))
    assert schedule.events[1] == MembershipEvent(seconds=129.0, joins=(2,))
    assert [len(event.leaves) - len(event.joins) for event in schedule.events] == [1, -1, 2, 1, -3, 1, 1]
    assert schedule.num_ignored_arrivals == 39, "8 at first, 31 later"
    assert "ignored arrivals: 39" in schedule.summary()


def test_the_first_event_is_second_zero_and_the_end_is_not_part_of_it() -> None:
    found = trace("5000,add,a", "5000,add,b", "65000,remove,a", "125000,add,c")
    schedule = found.schedule(most_nodes=4, minutes=2, scale=0.5)
    assert (schedule.num_initial_nodes, schedule.duration_seconds) == (2, 60.0)
    assert schedule.events == (MembershipEvent(seconds=30.0, leaves=(0,)),)
    assert len(found.schedule(most_nodes=4).events) == 2, "all of it has its last instant, too"


def test_a_freed_number_goes_to_later_arrivals_only() -> None:
    schedule = trace("0,add,a", "1000,remove,a", "1000,add,b", "2000,add,c", "3000,remove,b").schedule(most_nodes=1)
    assert schedule.events == (
        MembershipEvent(seconds=1.0, leaves=(0,)),
        MembershipEvent(seconds=2.0, joins=(0,)),
    ), "b found no number, so its end belongs to no failure"
    assert schedule.num_ignored_arrivals == 1


def test_a_node_that_is_back_in_the_same_instant_never_left() -> None:
    assert trace("0,add,a", "9,remove,a", "9,add,a", "9,add,b", "9,remove,b").schedule(most_nodes=3).events == ()


def test_repeated_rows_count_once_and_any_line_end_will_do() -> None:
    found = trace("0,add,a", "0,add,a", "7,remove,a", "7,remove,a", end="\n")
    assert found.num_repeated_rows == 2 and found.schedule(most_nodes=1).num_leaves == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"0,add,a\r\n10,remove,a", "t.csv:2: the last line does not end"),
        (b"0,add,a\r\n10,rem\r\n", "t.csv:2: b'10,rem"),
        (b"0,add,a\n\n10,remove,a\n", "t.csv:2: b''"),
        (b"0,no-op,a\n", "t.csv:1: "),
        (b"-1,add,a\n", "t.csv:1: "),
        (b"1.5,add,a\n", "t.csv:1: "),
        (b"0,add,a,b\n", "t.csv:1: "),
        (b"0,add,\n", "t.csv:1: "),
        (b"0,add, a\n", "t.csv:1: "),
        ("0,add,\u00e4\n".encode(), "t.csv:1: "),
        ("\u0660,add,a\n".encode(), "t.csv:1: "),
        (b"\xff\xfe\n", "t.csv:1: "),
        (b"9" * 16 + b",add,a\n", "t.csv:1: "),
        (b"5,add,a\n4,add,b\n", "t.csv:2: time 4: must be at least 5"),
        (b"0,add,a\n5,add,a\n", "t.csv:2: add a: a is present already"),
        (b"0,add,a\n5,remove,b\n", "t.csv:2: remove b: b is not present"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(content: bytes, message: str) -> None:
    with pytest.raises(DataError) as raised:
        MembershipTrace.parse("t.csv", content)
    assert message in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv: cannot be read"):
        MembershipTrace.read(tmp_path / "none.csv")


@pytest.mark.parametrize(
    "arguments",
    [{"most_nodes": 0}, {"minutes": 0.0}, {"minutes": float("nan")}, {"scale": -1.0}, {"scale": float("inf")}],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        trace("0,add,a").schedule(**{"most_nodes": 2, **arguments})


def schedule(**changed: Any) -> FailureSchedule:
    events = (
        MembershipEvent(seconds=1.0, leaves=(0, 2)),
        MembershipEvent(seconds=1.0, leaves=(1,), joins=(2, 3)),
    )
    values = {"source": "t", "most_nodes": 4, "num_initial_nodes": 3, "duration_seconds": 9.0, "events": events}
    return FailureSchedule(**{**values, **changed})


def test_a_schedule_survives_json_and_counts_its_nodes() -> None:
    whole = schedule(num_ignored_arrivals=5)
    whole.validate()
    assert FailureSchedule.from_json(whole.to_json()) == whole
    assert (whole.num_leaves, whole.num_joins, whole.most_lost_at_once) == (3, 2, 2)
    assert whole.num_nodes_after() == (1, 2)
    assert "departures: 3 (most at once: 2, fewest nodes: 1); arrivals: 2" in whole.summary()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_initial_nodes": 5}, "num_initial_nodes=5"),
        ({"most_nodes": 0, "num_initial_nodes": 0}, "num_initial_nodes"),
        ({"duration_seconds": 1.0}, r"events\[0\].seconds=1"),
        ({"duration_seconds": float("inf")}, "duration_seconds"),
        ({"num_ignored_arrivals": -1}, "num_ignored_arrivals"),
        ({"events": (MembershipEvent(seconds=0.0),)}, r"events\[0\]"),
        ({"events": (MembershipEvent(seconds=0.0, leaves=(3,)),)}, r"events\[0\].leaves=\[3\]"),
        (
            {"events": (MembershipEvent(seconds=0.0, leaves=(1, 1)),)},
            "must be in ascending order and name each node once",
        ),
        ({"events": (MembershipEvent(seconds=0.0, joins=(1,)),)}, r"events\[0\].joins=\[1\]"),
        ({"events": (MembershipEvent(seconds=0.0, joins=(4,)),)}, r"events\[0\].joins=\[4\]"),
        ({"events": (MembershipEvent(seconds=float("nan"), joins=(3,)),)}, "seconds=nan"),
    ],
)
def test_a_schedule_that_does_not_hold_together_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(**changed).validate()


@pytest.mark.parametrize(
    "changed",
    [
        {"events": None},
        {"events": [{"seconds": 0, "leaves": [0]}]},
        {"events": [{"seconds": 0, "leaves": [0.5], "joins": []}]},
        {"most_nodes": "4"},
        {"foreign": 1},
        {"num_initial_nodes": 9},
    ],
)
def test_damaged_json_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FailureSchedule.from_json({**schedule().to_json(), **changed})

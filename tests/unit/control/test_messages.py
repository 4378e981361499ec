"""Tests that every message is read according to its type or refused with one error, after which the controller
continues."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft import serde
from megatron_ft.control.controller.journal import Journal
from megatron_ft.control.membership.events import MachineEvent, NodeLost, RankExited, RankHung, StopRequested, Tick
from megatron_ft.control.membership.state import Failure, Outcome
from megatron_ft.control.messages import (
    MAX_JOIN_BYTES,
    MAX_RECORD_BYTES,
    MAX_REPORT_BYTES,
    Break,
    Change,
    End,
    EndReport,
    Kill,
    Order,
    Report,
    Stop,
    event_from_json,
    event_to_json,
    to_message,
)
from megatron_ft.control.report import JobResult
from megatron_ft.control.rpc import RpcError
from megatron_ft.errors import ControlError
from megatron_ft.framing import MAX_FRAME_BYTES, encode
from tests.unit.control.controller.test_backlog import Job
from tests.unit.control.controller.test_controller import broken, exited, raised, record, reported


def large_record(num_bytes: int) -> dict[str, Any]:
    """Return a record item whose JSON has this number of bytes."""
    item = {**record(0, 0), "record": {"text": ""}}
    overhead = len(encode(item)) - 4
    return {**item, "record": {"text": "x" * (num_bytes - overhead)}}


def test_a_record_that_is_taken_can_be_passed_on() -> None:
    item = large_record(MAX_RECORD_BYTES)
    Report.decode(item)
    origin = (2**31, 2**31, 2**62)
    assert len(encode({"op": "record", "record": item["record"], "origin": origin})) <= MAX_FRAME_BYTES
    with pytest.raises(ControlError, match=f"has {MAX_RECORD_BYTES + 1} bytes: must have at most {MAX_RECORD_BYTES}"):
        Report.decode(large_record(MAX_RECORD_BYTES + 1))


@pytest.mark.parametrize(
    "item",
    [
        {**exited(0), "log_tail": "x" * MAX_REPORT_BYTES},
        {**raised(0, 1.0), "traceback": "x" * MAX_REPORT_BYTES},
        {**raised(0, 1.0), "error": "x" * MAX_REPORT_BYTES},
    ],
)
def test_what_goes_into_the_journal_is_limited(item: dict[str, Any]) -> None:
    with pytest.raises(ControlError, match=f"must have at most {MAX_REPORT_BYTES}"):
        Report.decode(item)


@pytest.mark.parametrize(
    ("tail", "is_done", "expected"),
    [("first\n  RankLost: no compiler \n\n", False, "RankLost: no compiler"), (None, False, ""), ("last", True, "")],
)
def test_an_exit_report_has_the_last_line_of_the_log(tail: str | None, is_done: bool, expected: str) -> None:
    report = Report.decode({**exited(0), "done": is_done, "log_tail": tail})
    assert isinstance(report, EndReport)
    event = report.event()
    assert isinstance(event, RankExited) and event.last_line == expected


@pytest.mark.parametrize("number", [10**30, -(10**30)])
def test_numbers_are_those_of_a_machine(number: int) -> None:
    with pytest.raises(ControlError, match="returncode"):
        Report.decode({**exited(0), "returncode": number})


def test_too_large_a_report_is_refused_with_the_limit_and_not_kept(tmp_path: Path) -> None:
    job = Job(tmp_path / "journal.jsonl")
    try:
        job.run()
        entries = len(Journal(job.path).entries)
        with pytest.raises(RpcError, match=f"must have at most {MAX_RECORD_BYTES}") as refusal:
            job.deliver(0, 1, record(0, 1), large_record(MAX_RECORD_BYTES + 1))
        assert refusal.value.refused
        with pytest.raises(RpcError, match=f"must have at most {MAX_REPORT_BYTES}"):
            job.deliver(0, 1, {**raised(0, 1.0), "traceback": "x" * MAX_REPORT_BYTES})
        with pytest.raises(RpcError, match=f"must have at most {MAX_JOIN_BYTES}"):
            job.call("join", node=4, process_id=7, sidecars={"keeper": {"address": "x" * MAX_JOIN_BYTES}})
        assert len(Journal(job.path).entries) == entries
        assert job.deliver(0, 1, record(0, 1)) == 2
    finally:
        job.close()


def test_the_end_of_a_job_of_many_ranks_fits_into_one_message() -> None:
    about = {"node": 0, "error": "x" * 4096, "traceback": "x" * 65536, "log_tail": "x" * 4096, "log": "x" * 200}
    details = {rank: {**about, "number": rank} for rank in range(8192)}
    first = Failure(rank=5, at_seconds=1.0)
    end = JobResult(Outcome.FAILED, "rank 5 raised", first, details).to_json()
    assert len(encode({"op": "event", "event": "ended", "end": end})) <= MAX_FRAME_BYTES
    assert end["details"]["5"]["error"] == about["error"], "of the first one everything"


REPORTS = st.sampled_from(
    [reported(0), record(0, 1), exited(0), raised(0, 1.0), broken(0), {**reported(0), "op": "hung", "at_seconds": 1.0}]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(REPORTS, st.data())
def test_a_report_is_read_whole_or_refused_by_one_error(report: dict[str, Any], data: st.DataObject) -> None:
    """Any value of a field gives a result equal to the sent message, or raises the one expected error."""
    name = data.draw(st.sampled_from([*report, "unknown"]))
    changed = {**report, name: data.draw(JUNK)}
    try:
        found = Report.decode(changed)
    except ControlError as error:
        assert len(str(error)) < 500
        return
    assert name != "unknown", "a field that no type has was taken"
    sent = {key: value for key, value in changed.items() if value is not None}
    # A message contains numbers that JSON lacks, such as infinity, as text.
    assert {key: value for key, value in to_message(found).items() if key in sent} == serde.encode(sent)


@pytest.mark.parametrize("name", ["rank", "start", "generation", "at_seconds", "returncode", "done"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ControlError, match=f"malformed report exited: {name}: is missing"):
        Report.decode({key: value for key, value in exited(0).items() if key != name})


@pytest.mark.parametrize(
    "order",
    [
        Break(generation=1, lost=[2], reason="lost"),
        Change(generation=1, leaving=[], reason="joins"),
        Stop(survivors_end=True, reason="asked"),
        Kill(nodes=[0, 1], reason="late"),
        End(reason="finished"),
    ],
)
def test_orders_arrive_as_they_were_given(order: Order) -> None:
    sent = json.loads(json.dumps(to_message(order)))
    assert Order.decode(sent) == order
    with pytest.raises(ControlError, match=f"malformed order {order.op}: more: is not a field"):
        Order.decode({**sent, "more": 1})
    with pytest.raises(ControlError, match="unknown order 'dance'"):
        Order.decode({**sent, "op": "dance"})


@pytest.mark.parametrize(
    "event", [NodeLost(1, 2.5, "cable", 7), StopRequested(), RankHung(3, 1.0, "was unresponsive"), Tick()]
)
def test_machine_events_come_through_json(event: MachineEvent) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event

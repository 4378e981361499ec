"""Items that are larger than what can be passed on are refused, and the controller goes on."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.controller.job_result import JobEnd
from megatron_ft.control.controller.journal import Journal
from megatron_ft.control.controller.message_shapes import MAX_ITEM_BYTES, MAX_RECORD_BYTES, check_shape
from megatron_ft.control.controller.server import MAX_JOIN_BYTES
from megatron_ft.control.membership.state import Failure, Outcome
from megatron_ft.control.rpc import RpcError
from megatron_ft.errors import ControlError
from megatron_ft.framing import MAX_FRAME_BYTES, encode
from tests.unit.control.controller.test_backlog import Job
from tests.unit.control.controller.test_controller import exited, raised, record, reported


def large_record(num_bytes: int) -> dict[str, Any]:
    """A record item whose JSON has that many bytes."""
    item = {**record(0, 0), "record": {"text": ""}}
    overhead = len(encode(item)) - 4
    return {**item, "record": {"text": "x" * (num_bytes - overhead)}}


def test_a_record_that_is_taken_can_be_passed_on() -> None:
    item = large_record(MAX_RECORD_BYTES)
    check_shape(item)
    origin = (2**31, 2**31, 2**62)
    assert len(encode({"op": "record", "record": item["record"], "origin": origin})) <= MAX_FRAME_BYTES
    with pytest.raises(ControlError, match=f"has {MAX_RECORD_BYTES + 1} bytes: at most {MAX_RECORD_BYTES} are taken"):
        check_shape(large_record(MAX_RECORD_BYTES + 1))


@pytest.mark.parametrize(
    "item",
    [
        {**exited(0), "log_tail": "x" * MAX_ITEM_BYTES},
        {**raised(0, 1.0), "traceback": "x" * MAX_ITEM_BYTES},
        {**reported(0), "unknown": ["x" * MAX_ITEM_BYTES]},
    ],
)
def test_what_goes_into_the_journal_is_limited(item: dict[str, Any]) -> None:
    with pytest.raises(ControlError, match=f"at most {MAX_ITEM_BYTES} are taken"):
        check_shape(item)


@pytest.mark.parametrize("number", [10**30, -(10**30)])
def test_numbers_are_those_of_a_machine(number: int) -> None:
    with pytest.raises(ControlError, match="returncode"):
        check_shape({**exited(0), "returncode": number})


def test_who_hands_in_too_much_is_told_the_limit_and_nothing_is_kept(tmp_path: Path) -> None:
    job = Job(tmp_path / "journal.jsonl")
    try:
        job.run()
        entries = len(Journal(job.path).entries)
        with pytest.raises(RpcError, match=f"at most {MAX_RECORD_BYTES} are taken") as refusal:
            job.deliver(0, 1, record(0, 1), large_record(MAX_RECORD_BYTES + 1))
        assert refusal.value.refused
        with pytest.raises(RpcError, match=f"at most {MAX_ITEM_BYTES} are taken"):
            job.deliver(0, 1, {**raised(0, 1.0), "traceback": "x" * MAX_ITEM_BYTES})
        with pytest.raises(RpcError, match=f"at most {MAX_JOIN_BYTES} are taken"):
            job.call("join", node=4, process_id=7, services={"keeper": {"address": "x" * MAX_JOIN_BYTES}})
        assert len(Journal(job.path).entries) == entries
        assert job.deliver(0, 1, record(0, 1)) == 2
    finally:
        job.close()


def test_the_end_of_a_job_of_many_ranks_fits_into_one_message() -> None:
    about = {"node": 0, "error": "x" * 4096, "traceback": "x" * 65536, "log_tail": "x" * 4096, "log": "x" * 200}
    details = {rank: {**about, "number": rank} for rank in range(8192)}
    first = Failure(rank=5, at_seconds=1.0)
    end = JobEnd(Outcome.FAILED, "rank 5 raised", first, details).to_json()
    assert len(encode({"op": "event", "event": "ended", "end": end})) <= MAX_FRAME_BYTES
    assert end["details"]["5"]["error"] == about["error"], "of the first one everything"

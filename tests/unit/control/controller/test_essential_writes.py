"""Tests the writes on which decisions depend: how long they are repeated, and what they wait for."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.control.controller.journal import CannotDecide, EssentialWrites, Journal, StandingClock
from megatron_ft.control.membership.state import Outcome
from megatron_ft.durable import append_line


class Disk:
    """Disk that accepts a write after ``num_refusals`` failures."""

    def __init__(self, num_refusals: int, number: int = errno.ENOSPC) -> None:
        self.num_refusals, self.number = num_refusals, number

    def write(self) -> str:
        if self.num_refusals > 0:
            self.num_refusals -= 1
            raise OSError(self.number, "refused")
        return "written"


class Reports:
    """Stores the reports about waits."""

    def __init__(self, run_dir: Path) -> None:
        self.waits: list[str] = []
        self.waited: list[float] = []
        self.writes = EssentialWrites(run_dir, self.waits.append, self.waited.append)


@pytest.fixture
def reported(tmp_path: Path) -> Reports:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return Reports(run_dir)


def test_a_write_that_succeeds_waits_for_nothing(reported: Reports) -> None:
    assert reported.writes.do(Disk(0).write) == "written"
    assert (reported.waits, reported.waited) == ([], [])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_waited_for_and_reported_once(reported: Reports, number: int) -> None:
    before = reported.writes.clock()
    assert reported.writes.do(Disk(3, number).write) == "written"
    assert len(reported.waits) == 1 and reported.waits[0].endswith(f"/run: [Errno {number}] refused")
    (seconds,) = reported.waited
    assert reported.writes.clock() - before < seconds, "the clock was stopped"


def test_another_error_of_the_disk_is_not_waited_for(reported: Reports) -> None:
    with pytest.raises(OSError, match="refused"):
        reported.writes.do(Disk(1, errno.EIO).write)
    assert reported.waits == []


def test_who_asks_for_the_end_need_not_wait_for_room(reported: Reports) -> None:
    asks = threading.Timer(0.05, reported.writes.request_end)
    asks.start()
    with pytest.raises(CannotDecide, match="asked to stop") as raised:
        reported.writes.do(Disk(10**9).write)
    asks.join()
    assert raised.value.outcome is Outcome.INTERRUPTED


def delete(run_dir: Path) -> None:
    run_dir.rmdir()


def replace(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.mkdir()


@pytest.mark.parametrize("happens", [delete, replace])
def test_nothing_is_written_where_the_folder_is_gone(
    reported: Reports, tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    happens(tmp_path / "run")
    with pytest.raises(CannotDecide, match=r"/run was deleted or moved away") as raised:
        reported.writes.do(Disk(0).write)
    assert raised.value.outcome is Outcome.FAILED


def test_a_clock_goes_on_from_where_it_stood() -> None:
    now = [10.0]
    clock = StandingClock(lambda: now[0])
    assert clock() == 10.0
    for stopped_for in (5.0, 7.0):
        before = clock()
        clock.stop()
        now[0] += stopped_for
        assert clock() == before
        clock.go_on()
        assert clock() == before
        now[0] += 1.0
        assert clock() == before + 1.0


def test_what_was_written_in_part_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that becomes full accepts the first bytes of a line before it refuses the rest."""
    import os

    write, room = os.write, [7]

    def write_part(descriptor: int, content: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "full")
        count = write(descriptor, bytes(content)[: room[0]])
        room[0] -= count
        return count

    path = tmp_path / "decisions.jsonl"
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append({"a": 1})
    path.write_text("one\n")
    monkeypatch.setattr(os, "write", write_part)
    with pytest.raises(OSError, match="full"):
        append_line(path, b"another one\n")
    room[0] = 7
    with pytest.raises(OSError, match="full"):
        journal.append({"b": "a longer line"})
    room[0] = 1000
    assert path.read_text() == "one\n"
    append_line(path, b"another one\n")
    journal.append({"c": 3})
    assert path.read_text() == "one\nanother one\n"
    assert Journal(tmp_path / "journal.jsonl").entries == [{"a": 1}, {"c": 3}]


def test_what_could_not_be_synced_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync, the kernel has dropped the data that it could not write."""
    import os

    path, reported = tmp_path / "journal.jsonl", Reports(tmp_path)
    journal = Journal(path, reported.writes.do)
    journal.append({"a": 1})
    journal.sync()
    journal.append({"b": 2})
    fsync, num_bytes = os.fsync, path.stat().st_size

    def lose_and_fail(descriptor: int) -> None:
        os.pwrite(descriptor, b"\0" * 8, num_bytes - 8)
        monkeypatch.setattr(os, "fsync", fsync)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", lose_and_fail)
    journal.sync()
    assert (Journal(path).entries, len(reported.waits)) == ([{"a": 1}, {"b": 2}], 1)

"""Tests that drained nodes leave the job. Slurm and the controller are scripted; ``tests/slurm`` has real ones."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ft.control.admin import JobNotRunning
from megatron_ft.control.slurm import calls, drains
from megatron_ft.control.slurm.calls import SlurmError
from megatron_ft.errors import ConfigError, ControlError

HOSTS = ("a", "b", "c")


class Play:
    """Scripted answers of Slurm and of the controller."""

    def __init__(self, answers: Sequence[Sequence[str] | SlurmError], refusals: Sequence[Exception | None]) -> None:
        self.answers, self.refusals = list(answers), list(refusals)
        self.asked: list[int] = []
        self.is_over = threading.Event()

    def drained_hosts(self, hosts: Sequence[str]) -> Sequence[str]:
        assert tuple(hosts) == HOSTS
        if not self.answers:
            self.is_over.set()
            return []
        answer = self.answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    def __enter__(self) -> "Play":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def drain(self, node: int) -> None:
        self.asked.append(node)
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal


def watch(monkeypatch: pytest.MonkeyPatch, play: Play) -> list[int]:
    """Return the nodes that the controller was requested to release."""
    monkeypatch.setattr(calls, "drained_hosts", play.drained_hosts)
    monkeypatch.setattr(drains, "AdminClient", lambda run_dir: play)
    drains._watch(Path("run"), lambda: dict(enumerate(HOSTS)), 0.0, play.is_over)
    return play.asked


@pytest.mark.parametrize(
    ("answers", "refusals", "asked"),
    [
        ([["c"], ["c"], ["b", "c"]], [], [2, 1]),
        ([["c"], [], ["c"]], [], [2, 2]),
        ([["c"], SlurmError("does not answer"), ["c"]], [], [2]),
        ([["c"], ["c"], ["c"]], [ControlError("no other node can take its place")] * 2, [2, 2, 2]),
        ([["c"], ["c"], ["c"]], [JobNotRunning("not yet")], [2, 2]),
        ([["c"], ["c"], ["c"]], [ConfigError("no certificates"), OSError("stale file handle")], [2, 2, 2]),
    ],
    ids=["once each", "drained again", "Slurm is silent", "refused", "no controller yet", "cannot be asked now"],
)
def test_a_node_is_asked_for_when_it_is_drained(
    monkeypatch: pytest.MonkeyPatch,
    answers: Sequence[Sequence[str] | SlurmError],
    refusals: Sequence[Exception | None],
    asked: list[int],
) -> None:
    assert watch(monkeypatch, Play(answers, refusals)) == asked


def test_what_cannot_be_done_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    silent = SlurmError("does not answer")
    watch(monkeypatch, Play([silent, silent, ["b"], ["b"]], [ControlError("no other node can take its place")] * 2))
    output = capsys.readouterr().err
    assert output.count("cannot query Slurm for drained nodes, trying again: does not answer") == 1
    assert output.count("b is drained, but node 1 cannot leave: no other node can take its place") == 1


def test_a_node_that_comes_back_elsewhere_may_be_drained_there(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [{7: "a", 8: "b"}, {8: "b"}, {7: "c", 8: "b"}]
    play, is_over = Play([], []), threading.Event()

    def hosts() -> dict[int, str]:
        if not places:
            is_over.set()
            return {}
        return places.pop(0)

    monkeypatch.setattr(calls, "drained_hosts", lambda hosts: [host for host in hosts if host in "ac"])
    monkeypatch.setattr(drains, "AdminClient", lambda run_dir: play)
    drains._watch(Path("run"), hosts, 0.0, is_over)
    assert play.asked == [7, 7]


def test_a_pause_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for pause in ("0", "nan", "inf"):
        with pytest.raises(SystemExit):
            drains.main(["run", "--array", "17", "--poll-seconds", pause])
        assert "MFT_DRAIN_POLL_SECONDS" in capsys.readouterr().err


def test_the_end_waits_for_a_question_no_longer_than_a_call_may_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_asked, may_answer, threads = threading.Event(), threading.Event(), set(threading.enumerate())

    def never(_hosts: Sequence[str]) -> Sequence[str]:
        is_asked.set()
        assert may_answer.wait(60)
        return ["b"]

    play = Play([], [])
    monkeypatch.setattr(calls, "drained_hosts", never)
    monkeypatch.setattr(drains, "AdminClient", lambda run_dir: play)
    monkeypatch.setattr(calls, "CALL_SECONDS", 0.1)
    with drains.watch_drains(Path("run"), HOSTS, poll_seconds=0.0):
        assert is_asked.wait(60)
    assert "the query for drained nodes did not end within 0.1 s" in capsys.readouterr().err
    may_answer.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive()
    assert play.asked == [], "the next launcher has other numbers"
    monkeypatch.setattr(calls, "drained_hosts", lambda hosts: [])
    with drains.watch_drains(Path("run"), HOSTS, poll_seconds=60.0):
        pass
    assert capsys.readouterr().err == "", "one that ends is not spoken of"

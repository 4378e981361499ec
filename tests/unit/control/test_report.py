"""Tests the failure report."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control import report
from megatron_ft.control.launcher import _exit_code_of
from megatron_ft.control.membership.state import Decision, Failure, MembershipPolicy, Outcome, State, Step
from megatron_ft.control.report import (
    JobResult,
    _failed_records,
    failure_screen,
    lost_records,
    restart_records,
    resume_advice,
)
from megatron_ft.errors import ControlError, RankFailed, TrainingStopped
from megatron_ft.events import RankFailed as RankFailedEvent
from megatron_ft.events import RanksRestarted

RUN = Path("/runs/x")
POLICY = MembershipPolicy(
    num_nodes=2, ranks_per_node=2, start_timeout_seconds=1.0, stop_timeout_seconds=1.0, max_restarts=3
)


def died(rank: int, at: float, returncode: int = 1, *, by_us: bool = False, **more: Any) -> dict[int, dict[str, Any]]:
    about = {"node": rank // 2, "returncode": returncode, "at_seconds": at, "caused_by_us": by_us, "done": False}
    return {rank: {**about, "log": f"/runs/x/logs/rank-{rank:05d}.log", "log_tail": "last words", **more}}


def ended(first: int, *deaths: dict[int, dict[str, Any]]) -> JobResult:
    details = {rank: about for death in deaths for rank, about in death.items()}
    return JobResult(Outcome.FAILED, "why", Failure(rank=first, at_seconds=details[first]["at_seconds"]), details)


def test_the_first_is_shown_with_its_traceback_and_the_others_in_a_line_each() -> None:
    end = ended(
        3,
        died(
            3,
            10.0,
            error="ValueError: bad",
            traceback="Traceback\n  code()\n  ^^^^~~\nValueError: bad",
            iteration=7,
            phase="update",
        ),
        died(0, 10.25, error="RuntimeError: peer"),
        died(1, 10.5, -9, by_us=True),
        died(2, 10.5, -9, by_us=True),
    )
    screen = failure_screen(end, RUN, "resume!")
    assert "RANK 3 FAILED FIRST (node 1, iteration 7, phase update)" in screen
    assert "raised ValueError: bad" in screen
    assert "  code()\n  ValueError: bad" in screen, "no lines of carets"
    assert "rank 0, 0.250 s later: raised RuntimeError: peer" in screen
    assert "killed by the launcher: ranks 1-2" in screen
    assert "/runs/x/logs/rank-00003.log" in screen
    assert "resume!" in screen
    assert screen.index("Traceback") < screen.index("The other ranks")


LOST_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:234"


def test_errors_that_follow_from_the_first_failure_are_marked() -> None:
    end = ended(
        1, died(1, 1.0, -9), died(0, 1.2, error=LOST_PEER), died(2, 1.3, error=LOST_PEER), died(3, 2.0, error="E")
    )
    others = failure_screen(end, RUN, "").split("The other ranks:")[1]
    assert "pair.cc" not in others and "rank 3, 1.000 s later: raised E" in others
    assert "failed as a consequence, because another rank closed a connection (see their logs): ranks 0, 2" in others
    records = {record.rank: record for record in _failed_records(end, POLICY)}
    assert [rank for rank, record in records.items() if record.is_consequence] == [0, 2]
    assert records[0].error == LOST_PEER, "the record keeps the error"
    assert "pair.cc" not in records[0].describe().text and "consequence" in records[0].describe().text


def test_a_lost_connection_that_comes_first_is_a_failure() -> None:
    (record,) = _failed_records(ended(0, died(0, 1.0, error=LOST_PEER)), POLICY)
    assert not record.is_consequence and LOST_PEER in record.describe().text


def test_another_nodes_clock_makes_no_death_earlier_than_the_first() -> None:
    screen = failure_screen(ended(0, died(0, 10.0), died(3, 9.9994), died(2, 10.5), died(1, 9.0)), RUN, "")
    assert "-" not in screen.split("The other ranks:")[1].split("Its log")[0]
    assert screen.index("rank 1, 0.000 s later") < screen.index("rank 3, 0.000 s later") < screen.index("rank 2, 0.500")


def test_a_rank_without_traceback_shows_its_log() -> None:
    screen = failure_screen(ended(1, died(1, 1.0, -9)), RUN, "")
    assert "was killed by SIGKILL" in screen
    assert "out of memory" in screen
    assert "last words" in screen


def test_a_long_traceback_keeps_its_ends() -> None:
    text = "\n".join(f"line {number}" for number in range(1000))
    screen = failure_screen(ended(0, died(0, 1.0, error="E", traceback=text)), RUN, "")
    assert "line 0\n" in screen and "line 999\n" in screen
    assert len(screen.splitlines()) < 60


def test_a_thousand_ranks_fit_on_a_screen() -> None:
    deaths = [died(rank, float(rank), error="E", by_us=rank > 500) for rank in range(1000)]
    screen = failure_screen(ended(0, *deaths), RUN, "")
    assert len(screen.splitlines()) < 40
    assert "and 492 more" in screen
    assert "ranks 501-999" in screen


def test_events_name_the_first_and_leave_out_those_we_ended() -> None:
    end = ended(2, died(1, 2.0, error="E"), died(2, 1.0, -11), died(0, 3.0, -9, by_us=True))
    records = _failed_records(end, POLICY)
    assert [(record.rank, record.node, record.first, record.signal) for record in records] == [
        (2, 1, True, "SIGSEGV"),
        (1, 0, False, None),
    ]


def test_a_restart_is_reported_after_the_failures_it_answers() -> None:
    died_first = Failure(rank=2, at_seconds=1.0, iteration=7, detail="rank 2 was killed by SIGSEGV")
    state = State(generation=2, survived=((), (died_first,)), num_restarts=1)
    details = died(1, 2.0, error="E") | died(2, 1.0, -11) | died(0, 3.0, -9, by_us=True)
    first, second, restarted = restart_records(Step(state, Decision.RESTART, died_first.detail), details, POLICY)
    assert isinstance(first, RankFailedEvent) and isinstance(second, RankFailedEvent)
    assert [(event.rank, event.first) for event in (first, second)] == [(2, True), (1, False)]
    assert restarted == RanksRestarted(
        generation=2,
        reason="rank 2 was killed by SIGSEGV",
        failed_ranks=(2, 1),
        iteration=7,
        num_restarts_left=2,
    )


def test_a_failure_after_restarts_says_what_was_survived() -> None:
    end = ended(0, died(0, 1.0, -9))
    assert "started again" not in failure_screen(end, RUN, "")
    end.survived = ("rank 1 raised", "rank 3 was killed by SIGKILL")
    screen = failure_screen(end, RUN, "")
    assert "Earlier generations (restarts of all ranks: 2):" in screen
    assert "generation 1: rank 3 was killed by SIGKILL" in screen


def test_exit_codes() -> None:
    assert _exit_code_of(ended(0, died(0, 1.0))) == RankFailed.exit_code
    assert _exit_code_of(ended(0, died(0, 1.0, exit_code=6))) == TrainingStopped.exit_code
    lost = JobResult(Outcome.FAILED, "", Failure(node=0, at_seconds=1.0))
    assert _exit_code_of(lost) == ControlError.exit_code
    for outcome, expected in ((Outcome.INTERRUPTED, (130, 0)), (Outcome.FINISHED, (0, 0)), (Outcome.FAILED, (8, 8))):
        ends = [JobResult(outcome, "", None, {0: {"is_complete": complete}, 1: {}}) for complete in (False, True)]
        assert tuple(_exit_code_of(end) for end in ends) == expected, "a stop request at the end changes nothing"


def test_the_advice_repeats_the_command_without_its_faults() -> None:
    command = ["python", "pretrain_moe.py", "a.b=1 2", "run.name=old", "+testing.failpoints=[x]", "run.resume=never"]
    advice = resume_advice(command, RUN, has_checkpoint=True)
    assert advice.endswith("python pretrain_moe.py 'a.b=1 2' run.dir=/runs run.name=x run.resume=must")
    assert "run.resume=auto" in resume_advice(command, RUN, has_checkpoint=False)
    assert "fails again" not in advice
    assert "fails again" in resume_advice(command, RUN, has_checkpoint=True, fails_again=True)


def test_ranks_go_by_their_number_in_the_membership_that_failed() -> None:
    end = ended(3, died(3, 10.0, number=1, iteration=7, phase="update"), died(2, 10.5, number=0))
    end.survived, end.num_reforms = ("rank 0 was killed by SIGKILL",), 1
    screen = failure_screen(end, RUN, "")
    assert "RANK 1 FAILED FIRST (node 1, iteration 7, phase update)" in screen
    assert "rank 0, 0.500 s later" in screen
    assert "rank-00003.log" in screen, "its log keeps the number it was started with"
    assert "(restarts of all ranks: 0, changes of nodes without a restart: 1):\n  generation 0: rank 0 was" in screen
    assert [(event.rank, event.node) for event in _failed_records(end, POLICY)] == [(1, 1), (0, 1)]


def test_only_deaths_are_events_when_others_go_on() -> None:
    deaths = (Failure(rank=3, at_seconds=10.0),)
    step = Step(State(generation=1, survived=(deaths,)), Decision.REFORM, "rank 3 was killed")
    details = {**died(3, 10.0, -9, number=3), **died(0, 10.1, number=0, error="RuntimeError: peer")}
    (event,) = lost_records(step, details, POLICY)
    assert (event.rank, event.node, event.first, event.signal) == (3, 1, True, "SIGKILL")


def test_a_hung_rank_is_named_with_how_that_is_known() -> None:
    end = ended(2, died(2, 10.0, -9, hung="gave no sign for 2 s"))
    assert "gave no sign for 2 s, was killed by SIGKILL" in failure_screen(end, RUN, "")
    (event,) = _failed_records(end, POLICY)
    assert (event.error, event.signal) == ("gave no sign for 2 s", "SIGKILL")
    deaths = (Failure(rank=2, at_seconds=10.0, iteration=4, detail="rank 2 gave no sign for 2 s"),)
    step = Step(State(generation=1, survived=(deaths,)), Decision.REFORM, deaths[0].detail)
    (event,) = lost_records(step, {}, POLICY)
    assert (event.rank, event.iteration, event.error) == (2, 4, "rank 2 gave no sign for 2 s"), "its exit comes later"


@pytest.mark.parametrize("exit_is_known", [False, True])
def test_a_rank_that_was_killed_for_not_reporting_is_an_event(exit_is_known: bool) -> None:
    """The control plane killed its node. The rank's exit may be known or unknown when the other nodes continue."""
    why = "rank 1 did not report its position (recovery.position_timeout_seconds=10)"
    deaths = (Failure(rank=0, at_seconds=10.0), Failure(rank=2, number=1, at_seconds=10.0, detail=why))
    step = Step(State(generation=2, survived=(deaths,)), Decision.REFORM, "rank 0 was killed by SIGKILL")
    details = died(0, 10.0, -9, number=0)
    if exit_is_known:
        details |= died(2, 20.0, -9, by_us=True, number=1, iteration=7)
    first, silent = lost_records(step, details, POLICY)
    assert (first.rank, first.first, first.signal) == (0, True, "SIGKILL")
    assert (silent.rank, silent.node, silent.first, silent.error) == (1, 1, False, why)
    assert (silent.iteration, silent.signal) == ((7, "SIGKILL") if exit_is_known else (None, None))
    shown = silent.describe()
    assert shown is not None and shown.level == "bad" and why in shown.text


def test_memberships_that_ended_without_a_death_are_no_events() -> None:
    assert lost_records(Step(State(generation=1, survived=((),)), Decision.REFORM, "nodes [3] join"), {}, POLICY) == []


def test_a_fault_that_ended_a_process_is_not_denied_by_the_one_in_its_place() -> None:
    faults = report.InjectedFaults()
    spec = "kill(node=3, at_iteration=4, phase='forward')"
    denied = {"kind": "failpoint_unfired", "failpoint": spec, "rank": 3, "node": 3}
    assert faults.is_news(denied), "it has not fired yet"
    assert faults.is_news({"kind": "failpoint_hit", "action": "kill", "failpoint": spec, "rank": 2, "node": 3})
    assert not faults.is_news(denied)
    assert faults.is_news({**denied, "node": 2}), "another node's process lives"
    assert faults.is_news({**denied, "failpoint": "kill(node=3, at_iteration=9, phase='forward')"})
    slow = "delay(seconds=1.0, phase='forward')"
    faults.is_news({"kind": "failpoint_hit", "action": "delay", "failpoint": slow, "rank": 2, "node": 3})
    assert faults.is_news({**denied, "failpoint": slow}), (
        "it ended no process: another rank of the node may have missed it"
    )

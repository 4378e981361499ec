"""Tests the detection of missing heartbeats and missing progress on a virtual clock."""

from dataclasses import replace

import pytest

from megatron_ft.control.detector import Detector, DetectorPolicy, Place, SignsOfLife
from megatron_ft.control.membership.events import JobHung, NodeLost, RankBroken, RankHung
from megatron_ft.control.membership.state import MembershipPolicy, Nodes, Phase, State
from megatron_ft.planning.recovery.membership import Position

MEMBERSHIP = MembershipPolicy(
    num_nodes=2, ranks_per_node=2, start_timeout_seconds=100.0, stop_timeout_seconds=20.0, min_nodes=1
)
POLICY = DetectorPolicy(heartbeat_interval_seconds=1.0, heartbeat_timeout_seconds=10.0, hang_seconds=60.0)
RUNNING = State(phase=Phase.RUNNING, nodes=Nodes.of((0, 1)))
AT = 1000.0


def looks(detector: Detector, state: State, start: float, seconds: float) -> list[NodeLost | RankHung | JobHung]:
    """Return the losses that are found if the detector is called every second."""
    return [
        event for second in range(int(seconds)) for event in detector.look(state, start + second, AT + start + second)
    ]


def test_who_is_silent_for_the_timeout_is_named_until_forgotten() -> None:
    signs = SignsOfLife[str](10.0)
    signs.hear("a", 0.0)
    signs.hear("b", 0.0)
    for now in (0.0, 4.0, 8.0):
        assert signs.silent(now) == []
    signs.hear("b", 8.0)
    assert signs.silent(10.0) == ["a"]
    assert (signs.seconds_since("a", 10.0), signs.seconds_since("b", 10.0)) == (10.0, 2.0)
    signs.forget("a")
    assert signs.silent(11.0) == []
    assert signs.seconds_since("a", 11.0) is None


def test_whoever_was_held_up_itself_gives_everybody_the_whole_time_again() -> None:
    signs = SignsOfLife[str](10.0)
    signs.hear("a", 0.0)
    signs.silent(1.0)
    assert signs.silent(30.0) == []
    for now in (34.0, 38.0):
        assert signs.silent(now) == []
    assert signs.silent(40.0) == ["a"]


def test_a_node_that_does_not_call_is_lost_once() -> None:
    detector = Detector(MEMBERSHIP, replace(POLICY, hang_seconds=None))
    detector.hear(0, 0.0)
    detector.hear(1, 0.0)
    assert looks(detector, RUNNING, 0.0, 10) == []
    detector.hear(0, 9.5)
    (lost,) = looks(detector, RUNNING, 10.0, 5)
    assert lost == NodeLost(1, AT + 10.0, "no heartbeat from its agent (detector.heartbeat_timeout_seconds=10)")
    assert detector.seconds_since_word(1, 15.0) is None
    assert looks(detector, RUNNING, 15.0, 4) == []


def test_ranks_furthest_behind_are_hung_when_nobody_gets_further() -> None:
    detector = Detector(MEMBERSHIP, POLICY)
    assert looks(detector, RUNNING, 0.0, 1) == []
    for rank, step in ((0, 3), (1, 2), (2, 3), (3, 2)):
        detector.progress(rank, Place(7, "backward" if step == 2 else "vote_before", step), 1.0)
    assert looks(detector, RUNNING, 1.0, 60) == []
    detector.progress(0, Place(7, "update", 4), 60.5)
    assert looks(detector, RUNNING, 61.0, 59) == [], "another rank made progress"
    hung = looks(detector, RUNNING, 120.0, 2)
    detail = "made no progress for detector.hang_seconds=60: it is in iteration 7, phase backward"
    assert hung == [RankHung(rank, AT + 121.0, detail, 7) for rank in (1, 3)]
    assert looks(detector, RUNNING, 122.0, 50) == [], "it is reported once"


def trained(detector: Detector, seconds: float, iterations: int = 5) -> float:
    """Let rank 0 report ``iterations`` iterations of ``seconds`` each, in generation 0. Return the time of the last
    report."""
    detector.look(RUNNING, 0.0, AT)
    for number in range(iterations + 1):
        detector.progress(0, Place(1 + number, "forward", 1), seconds * number)
    return seconds * iterations


@pytest.mark.parametrize(("seconds", "limit"), [(0.5, 30), (5.0, 50), (100.0, 600)])
def test_the_limit_of_a_hang_follows_the_duration_of_an_iteration(seconds: float, limit: int) -> None:
    detector = Detector(MEMBERSHIP, DetectorPolicy())
    last = trained(detector, seconds)
    detector.progress(1, Place(6, "backward", 2), last)
    assert looks(detector, RUNNING, last, limit) == []
    hung = looks(detector, RUNNING, last + limit, 1)
    key = "detector.hang_seconds=600" if limit == 600 else f"{limit} s (detector.hang_iterations=10)"
    assert [type(event) for event in hung] == [RankHung] * 2 and f"no progress for {key}:" in hung[0].detail


def test_first_iterations_saves_and_evaluations_have_the_longer_limit() -> None:
    for iterations, phase in ((2, "forward"), (5, "checkpoint"), (5, "evaluation"), (5, "replay")):
        detector = Detector(MEMBERSHIP, DetectorPolicy())
        last = trained(detector, 0.5, iterations)
        detector.progress(1, Place(iterations + 1, phase, 2), last)
        assert looks(detector, RUNNING, last, 600) == []
        assert looks(detector, RUNNING, last + 600, 1)
    detector = Detector(MEMBERSHIP, DetectorPolicy())
    last = trained(detector, 0.5)
    following = replace(RUNNING, generation=1)
    detector.look(following, last, AT + last)
    detector.progress(0, Place(7, "forward", 1), last + 1)
    assert looks(detector, following, last + 1, 600) == [], "the iterations of the previous membership do not count"


@pytest.mark.parametrize("policy", [{"hang_seconds": None}, {"hang_iterations": None}])
def test_either_limit_of_a_hang_can_be_switched_off(policy: dict[str, None]) -> None:
    detector = Detector(MEMBERSHIP, replace(DetectorPolicy(), **policy))
    last = trained(detector, 0.5)
    assert looks(detector, RUNNING, last, 600) == []


def test_a_rank_that_never_said_anything_is_behind_all_others() -> None:
    detector = Detector(MEMBERSHIP, POLICY)
    detector.look(RUNNING, 0.0, AT)
    for rank in (0, 1, 3):
        detector.progress(rank, Place(1, "data", 1), 1.0)
    (hung,) = looks(detector, RUNNING, 1.0, 61)
    assert isinstance(hung, RankHung) and (hung.rank, hung.iteration) == (2, 0)
    assert "before the first iteration" in hung.detail


def test_ranks_that_stand_at_the_same_place_are_hung_together() -> None:
    detector = Detector(MEMBERSHIP, POLICY)
    detector.look(RUNNING, 0.0, AT)
    for rank in range(4):
        detector.progress(rank, Place(7, "backward", 2 + rank), 1.0)
    detector.progress(9, Place(1, "data", 1), 1.0)  # of a node that is no member
    (hung,) = looks(detector, RUNNING, 1.0, 61)
    assert isinstance(hung, JobHung)
    assert hung.detail.startswith("no rank made progress for detector.hang_seconds=60: all are in iteration 7")
    silent = Detector(MEMBERSHIP, POLICY)
    assert [type(event) for event in looks(silent, RUNNING, 0.0, 62)] == [JobHung]


def test_ranks_are_not_hung_because_the_detector_stood_still() -> None:
    detector = Detector(MEMBERSHIP, POLICY)
    assert looks(detector, RUNNING, 0.0, 10) == []
    assert looks(detector, RUNNING, 100.0, 59) == [], "reports of progress may still wait"
    assert [type(event) for event in looks(detector, RUNNING, 159.0, 3)] == [JobHung]


def test_nobody_is_hung_while_ranks_start_stop_or_say_how_far_they_are() -> None:
    output = RankBroken(0, Position(rank=0, generation=0, completed=1, contributed=1, vote=None), 0.0)
    for state in (
        replace(RUNNING, phase=Phase.STARTING),
        replace(RUNNING, phase=Phase.REFORMING),
        replace(RUNNING, broken=(output,)),
        replace(RUNNING, gone=frozenset(range(4))),
    ):
        assert looks(Detector(MEMBERSHIP, POLICY), state, 0.0, 200) == []
    assert looks(Detector(MEMBERSHIP, replace(POLICY, hang_seconds=None)), RUNNING, 0.0, 1000) == []


def test_each_membership_has_the_whole_time() -> None:
    detector = Detector(MEMBERSHIP, POLICY)
    assert looks(detector, RUNNING, 0.0, 59) == []
    assert looks(detector, replace(RUNNING, generation=1), 59.0, 60) == []
    assert len(looks(detector, replace(RUNNING, generation=1), 119.0, 2)) == 1

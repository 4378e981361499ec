"""Tests failpoints: their syntax, which rank they affect, and that a hit is on disk before the fault."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft import failpoints
from megatron_ft.errors import ConfigError
from megatron_ft.events import FailpointHit, Record
from megatron_ft.failpoints import PHASES, Failpoint, InjectedFault, append_to, arm, hit


@pytest.fixture(autouse=True)
def unarmed() -> Iterator[None]:
    yield
    arm([], rank=0, node=0, record=lambda _: None)


def test_a_spec_is_read() -> None:
    found = Failpoint.parse(' kill( rank=1, at_iteration=7, phase="backward") ')
    assert (found.action, found.rank, found.node, found.at_iteration, found.phase) == ("kill", 1, None, 7, "backward")
    assert Failpoint.parse("delay(phase='data', seconds=2)").seconds == 2.0
    assert Failpoint.parse("raise(phase='vote_inside', message='x', node=2)").message == "x"
    assert Failpoint.parse("exit(phase='build', code=3)").code == 3


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "must be a call"),
        ("kill", "must be a call"),
        ("explode(phase='data')", "must be a call of one of"),
        ("kill(phase='lunch')", "must set phase to one of"),
        ("kill(rank=1)", "must set phase to one of"),
        ("kill(1, phase='data')", "keyword arguments only"),
        ("kill(phase='data', color=1)", "must not have the keyword color"),
        ("kill(**{'phase': 'data'})", "must not have the keyword **"),
        ("kill(phase='data', rank='1')", "literal of type int"),
        ("kill(phase='data', rank=True)", "literal of type int"),
        ("kill(phase='data', rank=1+1)", "rank as a literal"),
        ("kill(phase='data', rank=open('x'))", "rank as a literal"),
        ("kill(phase='data', rank=-1)", "rank a value of at least 0"),
        ("delay(phase='data', seconds=-1)", "`seconds` a value of at least 0"),
        ("kill(phase='data'", "must be a call"),
        ("kill(phase='data') or kill(phase='data')", "one call"),
        ("kill(phase='data')(phase='data')", "one call"),
        ("exit(phase='data')", "must give the keyword code"),
        ("exit(phase='data', code=256)", "from 0 to 255"),
        ("delay(phase='data')", "must give the keyword seconds"),
        ("kill(phase='data', seconds=1.0)", "must not have the keyword seconds"),
        ("kill(phase='data', rank=1, rank=2)", "must give rank only once"),
    ],
)
def test_bad_specs_are_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Failpoint.parse(text)
    assert word in str(caught.value)
    assert "testing.failpoints=" in str(caught.value)


def test_a_fault_happens_once_where_it_was_asked_for_and_is_recorded_first() -> None:
    recorded: list[dict[str, Any]] = []
    arm(["raise(rank=1, at_iteration=3, phase='update')"], rank=1, node=0, record=recorded.append)
    hit("update", 2)
    hit("forward", 3)
    assert not recorded
    with pytest.raises(InjectedFault, match="rank 1, iteration 3, update"):
        hit("update", 3)
    hit("update", 3)
    (only,) = recorded
    event = Record.from_record(only)
    assert isinstance(event, FailpointHit)
    assert (event.action, event.phase, event.iteration, event.rank, event.node) == ("raise", "update", 3, 1, 0)


@pytest.mark.parametrize(("rank", "node", "expected"), [(1, 0, False), (2, 1, True), (3, 1, True), (4, 2, False)])
def test_a_node_means_all_its_ranks(rank: int, node: int, expected: bool) -> None:
    recorded: list[dict[str, Any]] = []
    arm(["delay(node=1, phase='data', seconds=0)"], rank=rank, node=node, record=recorded.append)
    hit("data", 9)
    assert bool(recorded) is expected


def test_a_process_that_goes_on_obeys_the_generation_it_is_in() -> None:
    fired: list[str] = []
    failpoints.arm(
        [
            f"delay(generation={number}, phase='{phase}', seconds=0)"
            for number, phase in enumerate(("update", "gather"))
        ],
        rank=0,
        node=0,
        record=lambda hit: fired.append(hit["phase"]),
    )
    failpoints.hit("gather", 1)
    failpoints.enter(1, rank=0)
    failpoints.hit("update", 2)
    failpoints.hit("gather", 2)
    failpoints.enter(2, rank=0)
    failpoints.hit("gather", 3)
    assert fired == ["gather"]
    assert [failpoint.phase for failpoint in failpoints.unfired()] == ["update"]


@pytest.mark.parametrize(("generation", "fires"), [(0, ["every", "first"]), (1, ["every", "second"]), (2, ["every"])])
def test_a_generation_means_the_ranks_of_that_start_only(generation: int, fires: list[str]) -> None:
    recorded: list[dict[str, Any]] = []
    specs = {"every": "data", "first": "update", "second": "gather"}
    arm(
        [
            "delay(phase='data', seconds=0)",
            "delay(generation=0, phase='update', seconds=0)",
            "delay(generation=1, phase='gather', seconds=0)",
        ],
        rank=0,
        node=0,
        generation=generation,
        record=recorded.append,
    )
    for phase in specs.values():
        hit(phase, 1)
    assert [record["phase"] for record in recorded] == [specs[name] for name in fires]
    still_to_come = [failpoint.generation for failpoint in failpoints.unfired()]
    assert still_to_come == ([1] if generation == 0 else [])


def test_every_phase_can_be_named_and_others_are_our_own_mistake() -> None:
    for phase in PHASES:
        assert Failpoint.parse(f"kill(phase='{phase}')").phase == phase
    arm(["delay(phase='data', seconds=0)"], rank=0, node=0, record=lambda _: None)
    with pytest.raises(AssertionError, match="unknown phase"):
        hit("lunch", 1)


@pytest.mark.parametrize(
    ("spec", "status"),
    [("kill(phase='data')", -signal.SIGKILL), ("exit(phase='data', code=7)", 7)],
)
def test_the_hit_is_on_disk_when_the_process_is_gone(tmp_path: Path, spec: str, status: int) -> None:
    path = tmp_path / "failpoints.jsonl"
    process_id = os.fork()
    if process_id == 0:
        arm([spec], rank=0, node=0, record=append_to(path))
        hit("data", 1)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == status
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["iteration"] == 1


def test_a_fault_that_cannot_be_recorded_does_not_happen(tmp_path: Path) -> None:
    arm(["kill(phase='data')"], rank=0, node=0, record=append_to(tmp_path / "missing" / "failpoints.jsonl"))
    with pytest.raises(FileNotFoundError):
        hit("data", 1)


def test_an_unarmed_hit_does_nothing() -> None:
    arm(["kill(node=5, phase='data')"], rank=0, node=0, record=lambda _: None)
    assert failpoints._armed is None
    hit("data", 1)


def test_every_phase_is_passed_somewhere() -> None:
    package = Path(failpoints.__file__).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    assert set(re.findall(r'\bfailpoints\.hit\(\s*"(\w+)"', sources)) == set(PHASES)


@pytest.fixture
def reported() -> Iterator[list[tuple[int, str]]]:
    seen: list[tuple[int, str]] = []
    failpoints.watch(lambda iteration, phase: seen.append((iteration, phase)))
    yield seen
    failpoints.watch(None)


def test_a_watcher_is_called_on_changes_only(reported: list[tuple[int, str]]) -> None:
    arm([], rank=0, node=0, record=lambda _: None)
    for phase in ("forward", "forward", "backward", "forward"):
        hit(phase, 1)
    hit("forward", 2)
    assert reported == [(1, "forward"), (1, "backward"), (1, "forward"), (2, "forward")]


def test_a_watcher_is_called_before_the_fault(reported: list[tuple[int, str]]) -> None:
    arm(["raise(phase='vote_inside')"], rank=0, node=0, record=lambda _: None)
    with pytest.raises(InjectedFault):
        hit("vote_inside", 3)
    assert reported == [(3, "vote_inside")]


def test_what_has_not_fired_is_known() -> None:
    arm(["delay(phase='data', seconds=0)", "kill(phase='gather')"], rank=0, node=0, record=lambda _: None)
    hit("data", 1)
    assert [failpoint.text for failpoint in failpoints.unfired()] == ["kill(phase='gather')"]
    arm(["kill(rank=1, phase='gather')"], rank=0, node=0, record=lambda _: None)
    assert failpoints.unfired() == ()


def test_a_fault_waits_for_its_pass_in_the_generation_it_names() -> None:
    hits: list[Record] = []
    failpoints.arm(['raise(phase="forward", generation=2, passes=3)'], rank=0, node=0, record=hits.append, generation=1)
    for _ in range(5):
        failpoints.hit("forward", 1)
    failpoints.enter(2, rank=0)
    for iteration in (7, 8):
        failpoints.hit("forward", iteration)
        failpoints.hit("backward", iteration)
    with pytest.raises(failpoints.InjectedFault):
        failpoints.hit("forward", 9)
    failpoints.hit("forward", 10)
    assert [hit["iteration"] for hit in hits] == [9]


@pytest.mark.parametrize(("rank", "named", "fires"), [(4, 1, True), (0, 1, False), (0, None, True), (4, None, False)])
def test_a_rank_is_that_of_the_generation_that_is_named_else_the_first(
    rank: int, named: int | None, fires: bool
) -> None:
    hits: list[Record] = []
    narrowed = "" if named is None else f", generation={named}"
    arm([f"delay(phase='data', seconds=0, rank={rank}{narrowed})"], rank=0, node=7, record=hits.append)
    failpoints.enter(1, rank=4)
    failpoints.hit("data", 3)
    assert [hit["rank"] for hit in hits] == ([4] if fires else [])


def test_no_pass_before_the_first() -> None:
    with pytest.raises(ConfigError, match="`passes` a value of at least 1"):
        failpoints.Failpoint.parse('kill(phase="forward", passes=0)')

"""Tests that faults are drawn within the run, and that a trial counts only if the run's record proves the fault and
equal bits."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.covering import Row, combinations_of
from benchmarks.generations import Generation, generations_of, missing
from benchmarks.sparse_bitwise import Reference as Undisturbed
from benchmarks.sparse_bitwise import outcome_of, planned_trials
from benchmarks.sparse_faults import FACTORS, NUM_ITERATIONS, REPLAY, allowed, failpoints, faults_of, num_ranks, rows
from megatron_ft.failpoints import Failpoint
from megatron_ft.testing.jobs import JobResult

FAULT: Row = {"fault": 0, "phase": "update", "iteration": 2, "source": "memory"}
REFERENCE = Undisturbed(Generation([], [], [(1, 0.5), (2, 0.25), (3, 0.125)], []), (), ())


def test_rows_hold_every_pair_of_values() -> None:
    pairs = set().union(*(combinations_of(row, 2) for row in rows()))
    assert len(pairs) > 200
    assert all(allowed(row) and num_ranks(row) > int(str(row["copies"])) for row in rows())
    assert {value for row in rows() for value in [row["order"]]} == set(FACTORS["order"])


def test_enough_faults_are_drawn_each_within_reach() -> None:
    faults, trials = planned_trials(quick=False)
    assert len({json.dumps(trial) for trial in trials}) == len(trials) >= 60
    for mine in faults.values():
        at = [int(str(fault["iteration"])) for fault in mine if fault["iteration"] != REPLAY]
        assert at == sorted(set(at)), "each kill comes after what the generation continued from"
        assert at[-1] < NUM_ITERATIONS
        assert [fault["fault"] for fault in mine] == list(range(len(mine)))


def test_faults_are_what_ranks_can_read() -> None:
    text = failpoints(faults_of(rows()[0], 0, 5)).removeprefix("testing.failpoints=[").removesuffix("]")
    parsed = [Failpoint.parse(spec.strip("'")) for spec in text.split("','")]
    assert [failpoint.generation for failpoint in parsed] == [0, 1, 2, 3, 4]
    assert all(failpoint.rank is None for failpoint in parsed)


def test_a_fault_that_the_record_shows_passes() -> None:
    outcome = outcome_of(FAULT, 0, [killed(), continued()], [], REFERENCE)
    assert (outcome.proven, outcome.passed) == (True, True), outcome.details


def test_one_other_bit_fails() -> None:
    other = continued(losses=[(2, 0.25), (3, 0.12500001)])
    outcome = outcome_of(FAULT, 0, [killed(), other], [], REFERENCE)
    assert (outcome.proven, outcome.passed) == (True, False)


def test_what_a_later_generation_gets_wrong_is_a_later_faults() -> None:
    generations = [killed(), continued(), continued(losses=[(3, 9.0)])]
    assert outcome_of(FAULT, 0, generations, [], REFERENCE).passed


def test_a_fault_whose_replay_is_hit_is_judged_by_the_recovery_from_both() -> None:
    again = continued(losses=[])
    for last, passed in ((continued(), True), (continued(losses=[(3, 9.0)]), False)):
        outcome = outcome_of(FAULT, 0, [killed(), again, last], [], REFERENCE)
        assert (outcome.passed, outcome.num_compared > 0) == (passed, True), outcome.details
    assert outcome_of(FAULT, 0, [killed(), again], [], REFERENCE).num_compared == 0


def test_nothing_counts_without_its_record() -> None:
    for generations, reason in (
        ([killed()], "not started again"),
        ([killed(hits=[]), continued()], "no rank recorded the fault"),
        ([killed(hits=[{"phase": "update", "iteration": 3}]), continued()], "no rank recorded the fault"),
        ([killed(), continued(source="start_over")], "continued from start_over"),
        ([killed(window=2), continued()], "windows have only 2"),
    ):
        outcome = outcome_of(FAULT, 0, generations, [], REFERENCE)
        assert not outcome.proven and reason in outcome.details["unproven"][0], outcome.details


def test_a_fault_of_a_replay_must_hit_an_iteration_that_is_replayed() -> None:
    fault = {**FAULT, "phase": "dispatch", "iteration": REPLAY}
    for iteration, proven in ((2, True), (3, False)):
        killed_again = continued(hits=[{"phase": "dispatch", "iteration": iteration}])
        outcome = outcome_of(fault, 1, [killed(), killed_again, continued()], [], REFERENCE)
        assert outcome.proven is proven, outcome.details


def test_records_are_split_at_restarts(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [{"iteration": 1, "loss": 0.5, "time_unix_seconds": 1.0}])
    restart = {"kind": "ranks_restarted", "time_unix_seconds": 2.0}
    digest = {"kind": "state_digest", "time_unix_seconds": 3.0, "iteration": 1, "digests": ["a", "b"]}
    write(tmp_path / "events.jsonl", [restart, digest])
    first, second = generations_of(JobResult(0, tmp_path, ""))
    assert (first.losses, first.digests) == ([(1, 0.5)], [])
    assert (second.losses, second.digests) == ([], [(1, ("a", "b"))])
    assert missing([first, second], 1) == []
    assert missing([second], 1) == ["loss of iterations [1] never recorded"]


def generation(
    events: Sequence[dict[str, Any]] = (),
    hits: Sequence[dict[str, Any]] = (),
    losses: Sequence[tuple[int, float]] = (),
) -> Generation:
    """Return the records of one generation."""
    return Generation(events=events, hits=hits, losses=losses, digests=[])


def killed(hits: Sequence[dict[str, Any]] = ({"phase": "update", "iteration": 2},), window: int = 3) -> Generation:
    """Return the first generation, which a fault ends."""
    planned = {"kind": "snapshot_planned", "window_iterations": window}
    return generation([planned], hits, [(1, 0.5)])


def continued(
    source: str = "memory",
    losses: Sequence[tuple[int, float]] = ((3, 0.125),),
    hits: Sequence[dict[str, Any]] = (),
) -> Generation:
    """Return a later generation, which continues from ``source``."""
    in_window = source in ("memory", "persisted")
    found = {"strategy": "rollback", "source": source} if in_window else {"strategy": source}
    started: dict[str, Any] = {"kind": "recovery_started"} | found
    return generation([started | {"iteration": 2, "declined": []}], hits, losses)


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

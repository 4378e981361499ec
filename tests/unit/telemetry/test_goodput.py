"""Compares the goodput of made-up runs with values computed by hand. The shares always add up."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_ft import events
from megatron_ft.events import Metrics, Record
from megatron_ft.telemetry.goodput import Goodput, GoodputMeter

ZERO = 1_700_000_000.0
SHARES = ("useful", "stalled", "again", "skipped", "recovery", "between_jobs", "other")


def started(at: float, resumed: int | None = None) -> Record:
    about = {"run_name": "trial", "model": "moe_micro", "world_size": 2, "resumed_from_iteration": resumed}
    return events.RunStarted(time_unix_seconds=ZERO + at, **about)


def trained(iteration: int, at: float, seconds: float = 1.0) -> Record:
    values = {"loss": 1.0, "iteration_seconds": seconds, "tokens": 100.0}
    return Metrics(time_unix_seconds=ZERO + at, iteration=iteration, values=values)


def failed(at: float) -> Record:
    return events.RankFailed(time_unix_seconds=ZERO + at, rank=1)


def decided(at: float, iteration: int, strategy: str = "rollback") -> Record:
    return events.RecoveryStarted(time_unix_seconds=ZERO + at, generation=1, strategy=strategy, iteration=iteration)


def finished(at: float) -> Record:
    return events.RunFinished(time_unix_seconds=ZERO + at, exit_code=0, reason="done")


def stopped(at: float) -> Record:
    return events.RunStopped(time_unix_seconds=ZERO + at, exit_code=130, reason="SIGINT")


def shares(found: Goodput) -> dict[str, float]:
    """Return the shares that are not 0, in seconds. Times since 1970 have a resolution of about a microsecond."""
    seconds = {name: round(getattr(found, f"{name}_seconds"), 5) for name in SHARES}
    return {name: value for name, value in seconds.items() if value}


def committed(at: float, stalled_seconds: float) -> Record:
    about = {"iteration": 5, "start_iteration": 2, "num_iterations": 3, "stalled_seconds": stalled_seconds}
    return events.WindowCommitted(time_unix_seconds=ZERO + at, **about)


def test_a_run_with_one_recovery() -> None:
    found = Goodput.measure(
        [
            started(0.0),
            *(trained(iteration, 2.0 + iteration) for iteration in (1, 2, 3, 4)),  # up to 6 s
            failed(6.5),
            decided(9.0, 2),
            *(trained(iteration, 7.5 + iteration) for iteration in (3, 4, 5)),  # from 9.5 s on
            committed(12.5, 0.1),
            finished(13.0),
        ]
    )
    # 5 iterations less 0.1 s of waiting; 3 and 4 once more; 6 s to 9.5 s; 2 s of start and half a second at the end
    assert shares(found) == {"useful": 4.9, "stalled": 0.1, "again": 2.0, "recovery": 3.5, "other": 2.5}
    assert (found.num_iterations, found.num_interruptions, found.num_tokens) == (5, 1, 500)
    assert found.ettr == pytest.approx(4.9 / 13.0, abs=1e-6)
    assert found.tokens_per_second == pytest.approx(500 / 13.0, abs=1e-4)
    assert found.mtbf_seconds == pytest.approx(9.5, abs=1e-5) and found.iteration_seconds == pytest.approx(1.0)
    assert found.lost_per_interruption_seconds == pytest.approx(5.5, abs=1e-5)
    # 1 / (1 + 0.1 / 4.9) = 0.98, 1 / (1 + 5.5 / 9.5) = 19 / 30
    assert found.predicted_ettr == pytest.approx(0.98 * 19 / 30, abs=1e-6)


def test_an_undisturbed_run_is_predicted_as_one_minus_its_overhead() -> None:
    waited = events.CheckpointSaved(time_unix_seconds=ZERO + 5.2, iteration=5, blocked_seconds=0.2)
    moved = events.PlacementInForce(
        time_unix_seconds=ZERO + 5.3, iteration=6, reason="gain", stages=("plan",), seconds=0.1
    )
    ran = [trained(iteration, float(iteration) + (0.3 if iteration > 5 else 0.0)) for iteration in range(1, 11)]
    found = Goodput.measure([started(0.0), *ran, waited, moved, committed(9.9, 0.7), finished(10.3)])
    assert shares(found) == {"useful": 9.3, "stalled": 1.0}
    assert found.num_interruptions == 0 and math.isinf(found.mtbf_seconds)
    assert found.predicted_ettr == pytest.approx(1.0 - 1.0 / 10.3) == found.ettr
    assert found.summary()["mtbf_seconds"] is None, "JSON has no infinity"


def test_an_iteration_that_others_finish_after_a_failure_counts_and_the_recovery_is_one() -> None:
    found = Goodput.measure(
        [started(0.0), trained(1, 1.0), failed(1.5), trained(2, 2.0), decided(4.0, 2), trained(3, 6.0)]
    )
    assert shares(found) == {"useful": 3.0, "recovery": 3.0}
    assert found.num_interruptions == 1


def test_failures_one_after_the_other_are_one_interruption() -> None:
    records = [started(0.0), trained(1, 1.0), failed(1.5), decided(2.0, 1), failed(3.0), decided(4.0, 1)]
    assert Goodput.measure(records).num_interruptions == 1 and shares(Goodput.measure(records)) == {
        "useful": 1.0,
        "recovery": 3.0,
    }
    found = Goodput.measure([*records, trained(2, 5.5)])
    assert found.num_interruptions == 1 and shares(found) == {"useful": 2.0, "recovery": 3.5}


def test_time_between_jobs_is_distinguished() -> None:
    first = [started(0.0), trained(1, 1.0), trained(2, 2.0), stopped(2.5)]
    found = Goodput.measure([*first, started(12.5, resumed=1), trained(2, 14.0), finished(14.0)])
    assert shares(found) == {"useful": 2.0, "again": 1.0, "recovery": 1.0, "between_jobs": 10.0}
    assert found.num_interruptions == 1 and found.mtbf_seconds == pytest.approx(3.0, abs=1e-5)


def test_iterations_that_were_not_reported_count_as_the_next_that_was() -> None:
    reported = [trained(iteration, 2.0 * iteration, seconds=2.0) for iteration in (10, 20, 30)]
    found = Goodput.measure([started(0.0), *reported])
    assert shares(found) == {"useful": 60.0} and found.num_iterations == 30 and found.num_tokens == 3000
    # 12 of the 30 are lost: the last report stood for 21 to 30, the one before it for 11 to 20
    found = Goodput.measure([started(0.0), *reported, failed(60.0), decided(61.0, 18), trained(20, 65.0, seconds=2.0)])
    assert shares(found) == {"useful": 40.0, "again": 24.0, "recovery": 1.0}
    assert found.num_iterations == 20 and found.num_tokens == 2000


def test_a_report_that_was_lost_with_its_rank_breaks_nothing() -> None:
    found = Goodput.measure([started(0.0), trained(70, 1.0), failed(2.0), decided(5.0, 71), trained(72, 6.0)])
    assert shares(found) == {"useful": 2.0, "recovery": 4.0}


def test_skipped_iterations_do_not_count() -> None:
    skipped = events.IterationSkipped(time_unix_seconds=ZERO + 2.0, iteration=2, reason="non_finite")
    found = Goodput.measure([started(0.0), trained(1, 1.0), trained(2, 2.0), skipped, trained(3, 3.0)])
    assert shares(found) == {"useful": 2.0, "skipped": 1.0}
    assert found.num_iterations == 2 and found.num_tokens == 200 and found.num_interruptions == 0


def test_a_run_that_says_nothing_has_no_figures() -> None:
    for records in ([], [started(0.0)], [trained(1, -ZERO)]):
        found = Goodput.measure(records)
        assert (found.ettr, found.predicted_ettr, found.wall_seconds) == (None, None, 0.0)


KINDS = some.sampled_from(["train", "fail", "decide", "start", "stop", "commit", "skip"])
STEPS = some.lists(
    some.tuples(KINDS, some.floats(0.0, 5.0), some.integers(-1, 12), some.floats(-1.0, 9.0)), max_size=30
)


def records_of(steps: list[tuple[str, float, int, float]]) -> list[Record]:
    at, found = 0.0, []
    for kind, after, number, seconds in steps:
        at += after + 1e-3
        made = {
            "train": lambda at=at, n=number, s=seconds: trained(n, at, s),
            "fail": lambda at=at: failed(at),
            "decide": lambda at=at, n=number: decided(at, n),
            "start": lambda at=at, n=number: started(at, None if n < 0 else n),
            "stop": lambda at=at: stopped(at),
            "commit": lambda at=at, s=seconds: committed(at, s),
            "skip": lambda at=at, n=number: events.IterationSkipped(
                time_unix_seconds=ZERO + at, iteration=n, reason="non_finite"
            ),
        }[kind]
        found.append(made())
    return found


@given(STEPS)
def test_shares_are_never_negative_and_add_up(steps: list[tuple[str, float, int, float]]) -> None:
    found = Goodput.measure(records_of(steps))
    seconds = [getattr(found, f"{name}_seconds") for name in SHARES]
    assert min(seconds) >= -1e-5 and math.fsum(seconds) == pytest.approx(found.wall_seconds, abs=1e-4)
    assert found.ettr is None or -1e-6 <= found.ettr <= 1.0 + 1e-6
    assert found.predicted_ettr is None or 0.0 < found.predicted_ettr <= 1.0
    assert found.num_iterations >= 0 and found.num_interruptions <= len(steps)


@given(STEPS, some.randoms(use_true_random=False))
def test_the_order_of_files_does_not_matter(steps: list[tuple[str, float, int, float]], chance: random.Random) -> None:
    records, meter = records_of(steps), GoodputMeter()
    for record in records:
        meter.take(record)
    assert Goodput.measure(chance.sample(records, len(records))) == meter.result()

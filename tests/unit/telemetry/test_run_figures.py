"""Tests figures that are computed from several records: their values, their list, and their constant cost."""

import pytest
from hypothesis import assume, given

from megatron_ft import events
from megatron_ft.events import Record
from megatron_ft.telemetry.goodput import Goodput
from megatron_ft.telemetry.metrics import FROM_EVENTS, METRICS
from megatron_ft.telemetry.run_figures import RunFigures
from tests.unit.telemetry.conftest import is_listed
from tests.unit.telemetry.test_goodput import STEPS, ZERO, decided, failed, records_of, started, trained

GOODPUT = ("ettr", "ettr_predicted", "tokens_per_second", "interruptions")


def figures_of(*records: Record) -> dict[str, float]:
    run = RunFigures()
    for record in records:
        run.take(record)
    return run.hand_out()


def placed(survival: float | None = 0.9) -> Record:
    about = {"fewest_replicas": 2, "mean_replicas": 2.5, "most_replicas": 5, "single_loss_survival": survival}
    return events.PlacementInForce(iteration=1, reason="first", stages=(), **about)


def committed(stalled_seconds: float, *sizes: int) -> Record:
    names = ("captured_bytes", "replicated_bytes", "persisted_bytes")
    about = {"iteration": 5, "start_iteration": 2, "num_iterations": 3, "stalled_seconds": stalled_seconds}
    return events.WindowCommitted(**about, **dict(zip(names, sizes, strict=False)))


def planned() -> Record:
    sizes = {"window_bytes": 1, "dense_bytes": 1, "host_bytes": 1}
    return events.SnapshotPlanned(iteration=0, window_iterations=6, interval_iterations=6, reason="", **sizes)


def test_what_protects_the_run_holds_until_it_is_replaced() -> None:
    log = events.UpstreamLogPlanned(iteration=0, iterations_kept=8, log_bytes=100, node_bytes=200)
    run = RunFigures()
    for record in (started(0.0), placed(), planned(), log):
        run.take(record)
    expected = {
        "job/attempt": 1,
        "job/world_size": 2,
        "replicas/fewest": 2,
        "replicas/mean": 2.5,
        "replicas/most": 5,
        "replicas/single_loss_survival": 0.9,
        "snapshot/window_iterations": 6,
        "upstream_log/rank_bytes": 100,
        "upstream_log/node_bytes": 200,
    }
    assert run.hand_out().items() >= expected.items() and run.hand_out().items() >= expected.items()
    run.take(placed(None))
    assert "replicas/single_loss_survival" not in run.hand_out(), "where there is one domain nothing is known of it"


def test_sums_go_on_over_attempts_and_what_is_of_an_attempt_does_not() -> None:
    first = (started(0.0), placed(), planned(), committed(0.1, 10, 20, 0), committed(0.2, 10, 20, 30))
    found = figures_of(*first, started(9.0, 5), committed(0.3, 1, 2, 3))
    sums = {"captured_bytes": 21, "replicated_bytes": 42, "persisted_bytes": 33}
    assert {name: found[f"snapshot/{name}"] for name in sums} == sums
    assert found["snapshot/stalled_seconds"] == pytest.approx(0.6) and found["job/attempt"] == 2
    assert not {"replicas/fewest", "snapshot/window_iterations"} & found.keys()


def test_records_of_older_versions_give_what_they_have() -> None:
    found = figures_of(events.PlacementInForce(iteration=1, reason="first", stages=()), committed(0.1))
    assert {name for name in found if name.startswith(("replicas", "snapshot"))} == {"snapshot/stalled_seconds"}
    assert figures_of(committed(-3.0)).keys().isdisjoint({"snapshot/stalled_seconds"}), "a time that cannot be"


def test_a_recovery_is_reported_once_with_its_strategy_and_time() -> None:
    run = RunFigures()
    for record in (started(0.0), trained(1, 2.0), trained(2, 3.0), failed(3.5), decided(5.0, 2)):
        run.take(record)
    assert not any(name.startswith("recovery") for name in run.hand_out()), "it is not over"
    run.take(trained(3, 8.0))  # the iteration takes 1 s: 3 to 7 s went by without training
    found = run.hand_out()
    assert found["recovery/rollback_seconds"] == pytest.approx(4.0) and found["goodput/interruptions"] == 1
    run.take(trained(4, 9.0))
    assert "recovery/rollback_seconds" not in run.hand_out()


def restored(strategy: str) -> Record:
    return events.RecoveryStarted(generation=0, strategy=strategy, iteration=2, time_unix_seconds=ZERO + 4)


@pytest.mark.parametrize(
    ("records", "strategy"),
    [
        ([restored("rollback")], "rollback"),
        ([restored("checkpoint")], "checkpoint"),
        ([restored("rollback"), decided(4.1, 2, strategy="localized_replay")], "localized_replay"),
        ([], "unknown"),
    ],
)
def test_strategies_of_jobs_that_continue(records: list[Record], strategy: str) -> None:
    found = figures_of(started(0.0), trained(1, 2.0), trained(2, 3.0), *records, started(5.0, 2), trained(3, 7.0))
    assert found[f"recovery/{strategy}_seconds"] == pytest.approx(3.0)


def test_a_start_from_nothing_says_so() -> None:
    found = figures_of(started(0.0), trained(1, 2.0), started(5.0), trained(1, 7.0))
    assert "recovery/start_over_seconds" in found


@given(STEPS)
def test_goodput_as_it_goes_is_that_of_the_whole_and_every_name_is_listed(
    steps: list[tuple[str, float, int, float]],
) -> None:
    records, run = records_of(steps), RunFigures()
    for record in records:
        run.take(record)
    found, whole = run.hand_out(), Goodput.measure(records)
    assume(whole.useful_seconds == 0.0 or whole.useful_seconds > 1e-3)  # sums are kept in nanoseconds
    expected = (whole.ettr, whole.predicted_ettr, whole.tokens_per_second, whole.num_interruptions)
    for name, value in zip(GOODPUT, expected, strict=True):
        assert found.get(f"goodput/{name}") == (None if value is None else pytest.approx(value, rel=1e-4, abs=1e-4))
    assert all(map(is_listed, found)), found


def test_lists_do_not_overlap_and_each_name_is_described() -> None:
    assert not METRICS.keys() & FROM_EVENTS.keys()
    for name, metric in FROM_EVENTS.items():
        assert metric.unit and metric.meaning.endswith("."), name
    assert is_listed("expert_load/layer_12_p95_over_even") and is_listed("loss")
    assert not is_listed("expert_load/layer_12") and not is_listed("recovery/a_b_seconds")

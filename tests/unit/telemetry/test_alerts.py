"""Tests alerts: raised once, cleared once, sent to every sink. The free disk space is checked at intervals."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft import events
from megatron_ft.config.job import JobConfig
from megatron_ft.events import AlertCleared, AlertRaised, Metrics, Record
from megatron_ft.planning.iteration import ALERT_NAMES, AlertLimits
from megatron_ft.telemetry import open_sinks
from megatron_ft.telemetry.read import read_events
from megatron_ft.telemetry.sinks.alerts import DISK_SECONDS, NUM_WINDOWS, AlertSink, _free_share
from megatron_ft.telemetry.sinks.base import SinkContext
from megatron_ft.testing.made_up_runs import RUN_STARTED, metrics_record

from .conftest import FakeClock

LIMITS = AlertLimits(
    single_loss_survival=1.0,
    stall_share=0.05,
    windows_behind=3.0,
    free_disk_share=0.1,
    slowest_rank_over_median=2.0,
    lost_token_share=0.0375,
)


class Disk:
    """File system whose free share the test sets."""

    def __init__(self) -> None:
        self.free, self.looks = 0.5, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.free


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def sink(disk: Disk) -> AlertSink:
    return AlertSink(LIMITS, free_disk_share=disk)


def reported(sink: AlertSink, *records: Record) -> list[tuple[str, str, float]]:
    """Return kind, alert and value of the sink's reports for ``records``."""
    for record in records:
        sink.write(record)
    found = sink.take_reports()
    assert all(isinstance(alert, AlertRaised | AlertCleared) for alert in found)
    return [(alert.kind, alert.alert, alert.value) for alert in found]  # type: ignore[attr-defined]


def trained(iteration: int, at: float | None = None) -> Metrics:
    return Metrics(time_unix_seconds=at, iteration=iteration, values={"loss": 1.0, "iteration_seconds": 1.0})


def planned(iteration: int) -> Record:
    sizes = {"window_bytes": 1, "dense_bytes": 1, "host_bytes": 1}
    return events.SnapshotPlanned(
        iteration=iteration, window_iterations=4, interval_iterations=5, reason="fits", **sizes
    )


def committed(iteration: int, stalled_seconds: float = 0.0) -> Record:
    about = {"start_iteration": iteration - 5, "num_iterations": 4, "stalled_seconds": stalled_seconds}
    return events.WindowCommitted(iteration=iteration, **about)


def placed(survival: float | None) -> Record:
    return events.PlacementInForce(iteration=1, reason="first", stages=("plan",), single_loss_survival=survival)


def test_survival_is_reported_once_and_once_when_it_is_back(sink: AlertSink) -> None:
    assert reported(sink, placed(0.75)) == [("alert_raised", "single_loss_survival", 0.75)]
    assert reported(sink, placed(0.5), trained(1)) == [], "it stands already"
    assert reported(sink, placed(1.0)) == [("alert_cleared", "single_loss_survival", 1.0)]
    assert reported(sink, placed(None)) == [], "one domain"


def test_windows_that_are_not_committed(sink: AlertSink) -> None:
    assert reported(sink, planned(0), *(trained(iteration) for iteration in range(1, 16))) == []
    assert reported(sink, trained(16)) == [("alert_raised", "windows_behind", 3.2)]
    assert reported(sink, trained(17), committed(17)) == [("alert_cleared", "windows_behind", 0.0)]
    started = events.RunStarted(run_name="trial", model="moe_micro", world_size=2, resumed_from_iteration=100)
    assert reported(sink, started, trained(150)) == [], "no plan of windows yet"


def test_lost_tokens_and_those_at_risk_count_together(sink: AlertSink) -> None:
    def window(at_risk: float, lost: float) -> Record:
        return replace(committed(5), at_risk_share=at_risk, lost_share=lost)

    assert reported(sink, committed(4), window(0.03, 0.0)) == []
    assert reported(sink, window(0.03, 0.01)) == [("alert_raised", "lost_token_share", 0.04)]
    assert reported(sink, window(0.02, 0.01)) == [("alert_cleared", "lost_token_share", 0.03)]


def test_a_run_that_goes_back_is_not_behind(sink: AlertSink) -> None:
    back = events.RecoveryStarted(generation=1, strategy="rollback", iteration=10)
    assert reported(sink, planned(0), trained(15), back, planned(10), trained(25)) == []


def test_waiting_for_captures_is_judged_over_several_windows(sink: AlertSink) -> None:
    reported(sink, planned(0), trained(1))
    # 4 iterations of 1 s in each window: 5 windows that wait 0.3 s are 7.5 %
    assert reported(sink, *(committed(5 * number, 0.3) for number in range(1, NUM_WINDOWS))) == [], "too few yet"
    (raised,) = reported(sink, committed(5 * NUM_WINDOWS, 0.3))
    assert raised[:2] == ("alert_raised", "stall_share") and raised[2] == pytest.approx(0.075)
    assert [kind for kind, *_ in reported(sink, *(committed(30, 0.0) for _ in range(NUM_WINDOWS)))] == ["alert_cleared"]


def test_the_disk_is_looked_at_now_and_then(sink: AlertSink, disk: Disk) -> None:
    assert reported(sink, trained(1, 1000.0)) == []
    disk.free = 0.01
    assert reported(sink, trained(2, 1000.0 + DISK_SECONDS - 1)) == [] and disk.looks == 1
    assert reported(sink, trained(3, 1000.0 + DISK_SECONDS)) == [("alert_raised", "free_disk_share", 0.01)]
    assert disk.looks == 2


def test_nothing_is_watched_without_limits(disk: Disk) -> None:
    sink = AlertSink(AlertLimits(), free_disk_share=disk)
    assert reported(sink, placed(0.0), planned(0), trained(500, 1000.0)) == [] and disk.looks == 0


def test_limits_are_those_of_the_keys(config: JobConfig, tmp_path: Path, clock: FakeClock) -> None:
    config.telemetry.alert_stall_share = None
    config.telemetry.alert_free_disk_share = 0.25
    context = SinkContext(config=config, run_dir=tmp_path, world_size=2, clock=clock, stream=None, first_loss=None)
    assert AlertSink.open(context)._limits == AlertLimits(
        single_loss_survival=1.0,
        windows_behind=3.0,
        free_disk_share=0.25,
        slowest_rank_over_median=2.0,
        lost_token_share=0.0375,
    )


def test_the_free_share_of_a_real_disk(tmp_path: Path) -> None:
    assert 0.0 <= _free_share(tmp_path) <= 1.0
    with pytest.raises(FileNotFoundError):
        _free_share(tmp_path / "missing")


def test_alerts_reach_the_files_and_the_terminal(config: JobConfig, tmp_path: Path, clock: FakeClock) -> None:
    config.telemetry.alert_free_disk_share = None
    stream = io.StringIO()
    sinks = open_sinks(config, tmp_path / "run", world_size=2, clock=clock, stream=stream)
    for record in (RUN_STARTED, placed(0.75), metrics_record(1), placed(1.0)):
        sinks.write(record)
    sinks.close(0, "done")
    kinds = [record.kind for record in read_events(tmp_path / "run")]
    assert kinds == [
        "run_started",
        "placement_in_force",
        "alert_raised",
        "placement_in_force",
        "alert_cleared",
        "run_finished",
    ]
    assert "x alert: the job survives the loss of one failure domain with probability 0.750" in stream.getvalue()
    assert "(telemetry.alert_single_loss_survival=1)" in stream.getvalue()
    assert "+ alert cleared" in stream.getvalue()


def test_a_slow_rank_is_named_and_unknown_is_no_news(sink: AlertSink) -> None:
    def paced(iteration: int, over: float, rank: int = 3) -> Metrics:
        values = {"slowest_rank": rank, "slowest_node": rank + 4, "slowest_rank_over_median": over}
        return Metrics(iteration=iteration, values=values)

    sink.write(paced(1, 1.9))
    sink.write(paced(2, 2.5))
    (raised,) = sink.take_reports()
    assert isinstance(raised, AlertRaised) and (raised.rank, raised.node, raised.value) == (3, 7, 2.5)
    output = raised.describe()
    assert output is not None and "rank 3 on node 7 needs 2.5 times as long as the median rank" in output.text
    assert reported(sink, trained(3), paced(4, 4.0, rank=1)) == [], "it stands already"
    assert reported(sink, paced(5, 1.2)) == [("alert_cleared", "slowest_rank_over_median", 1.2)]
    sink.write(placed(0.5))
    (other,) = sink.take_reports()
    assert isinstance(other, AlertRaised) and other.rank is None


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_every_alert_has_words_and_names_its_key(name: str) -> None:
    output = AlertRaised(alert=name, value=0.25, limit=0.5, iteration=3).describe()
    assert output is not None and f"(telemetry.alert_{name}=0.5)" in output.text and len(output.text) > 60

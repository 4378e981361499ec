"""Tests all sinks together: the files of a run, and the effect of a failing sink."""

import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.events import Record, RunFinished
from megatron_ft.telemetry import SinkSet, open_sinks
from megatron_ft.telemetry.read import read_events, read_metrics
from megatron_ft.telemetry.sinks.base import Outcome, Sink
from megatron_ft.testing.made_up_runs import RUN_STARTED, metrics_record, run_records

from .conftest import FakeClock


class Remembering(Sink):
    """Sink that fails on request."""

    def __init__(self, name: str, *, retries: bool = True) -> None:
        self.name = name
        self.retries = retries
        self.broken = False
        self.breaks_on_close = False
        self.kinds: list[str] = []
        self.num_calls = 0
        self.closed: Outcome | None = None

    def write(self, record: Record) -> None:
        self.num_calls += 1
        if self.broken:
            raise RuntimeError("out of order\nsecond line")
        self.kinds.append(record.kind)

    def close(self, outcome: Outcome) -> None:
        if self.breaks_on_close:
            raise RuntimeError("cannot close")
        self.closed = outcome


def summary(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "summary.json").read_text())


def test_what_a_run_leaves_behind(config: JobConfig, run_dir: Path, clock: FakeClock) -> None:
    stream = io.StringIO()
    sinks = open_sinks(config, run_dir, world_size=2, clock=clock, stream=stream)
    sinks.write(RUN_STARTED)
    for record in run_records(1, 12):
        sinks.write(record)
    sinks.write({"kind": "checkpoint_saved", "iteration": 12})
    sinks.close(0, "all iterations done")

    assert [metrics.iteration for metrics in read_metrics(run_dir)] == list(range(1, 13))
    kinds = [event.kind for event in read_events(run_dir)]
    assert kinds[0] == "run_started" and kinds[-1] == "run_finished" and kinds.count("evaluation") == 3
    assert all(event.time_unix_seconds is not None for event in read_events(run_dir))
    found = summary(run_dir)
    assert found["iterations"] == 12
    assert found["first_loss"] == 5.0 and found["final_loss"] == 5.0 / 12
    assert found["tokens_per_second"] == 4096.0 and found["world_size"] == 2
    assert found["wall_seconds"] > 0
    # the clock moves a second with each record: 12 iterations of half a second in 29 seconds
    assert found["goodput"]["ettr"] == 6.0 / 29.0 and found["goodput"]["iterations"] == 12
    assert found["checkpoints"] == [12] and found["exit_code"] == 0 and found["failed_sinks"] == {}
    assert "all iterations done" in stream.getvalue()


@pytest.mark.parametrize(
    ("is_complete", "shown"), [(True, "run finished: done"), (False, "can continue the run: done")]
)
def test_the_end_of_a_job_tells_whether_the_run_is_complete(
    config: JobConfig, run_dir: Path, clock: FakeClock, is_complete: bool, shown: str
) -> None:
    stream = io.StringIO()
    open_sinks(config, run_dir, world_size=2, clock=clock, stream=stream).close(0, "done", is_complete=is_complete)
    (event,) = read_events(run_dir)
    assert isinstance(event, RunFinished) and event.is_complete == is_complete
    assert shown in stream.getvalue()


def test_a_resumed_run_appends_and_the_newest_record_counts(config: JobConfig, run_dir: Path, clock: FakeClock) -> None:
    first = open_sinks(config, run_dir, world_size=2, clock=clock, stream=io.StringIO())
    for record in [RUN_STARTED, *run_records(1, 7)]:
        first.write(record)
    (run_dir / "metrics.jsonl").open("a").write('{"kind":"metrics","itera')

    second = open_sinks(config, run_dir, world_size=2, clock=clock, stream=io.StringIO())
    second.write(RUN_STARTED | {"resumed_from": "checkpoints/4", "resumed_from_iteration": 4})
    for record in run_records(5, 12, loss_offset=100.0):
        second.write(record)
    second.close(0, "done")

    metrics = read_metrics(run_dir)
    assert [each.iteration for each in metrics] == list(range(1, 13))
    assert [each.values["loss"] > 100 for each in metrics] == [False] * 4 + [True] * 8
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 15, "older attempts stay"
    assert [event.kind for event in read_events(run_dir)].count("log_truncated") == 1
    found = summary(run_dir)
    assert found["first_loss"] == 5.0, "the first of the whole run"
    assert found["resumed_from"] == "checkpoints/4" and found["resumed_from_iteration"] == 4


def test_a_run_that_ends_early_says_why(config: JobConfig, run_dir: Path, clock: FakeClock) -> None:
    sinks = open_sinks(config, run_dir, world_size=2, clock=clock, stream=io.StringIO())
    sinks.write(metrics_record(1, "NaN"))
    sinks.write({"kind": "iteration_skipped", "iteration": 2, "reason": "non_finite", "values": {"loss": "NaN"}})
    sinks.close(7, "rank 1 died")
    ending = read_events(run_dir)[-1]
    assert (ending.kind, ending.exit_code, ending.reason, ending.iteration) == ("run_stopped", 7, "rank 1 died", 1)
    found = summary(run_dir)
    assert found["exit_code"] == 7 and found["reason"] == "rank 1 died" and found["skipped"] == 1
    assert found["first_loss"] == "NaN" and found["tokens_per_second"] == 4096.0


def test_an_ending_reported_by_the_run_is_not_repeated(config: JobConfig, run_dir: Path, clock: FakeClock) -> None:
    sinks = open_sinks(config, run_dir, world_size=2, clock=clock, stream=io.StringIO())
    sinks.write({"kind": "run_stopped", "exit_code": 6, "reason": "loss spike"})
    sinks.close(6, "TrainingStopped")
    assert [event.kind for event in read_events(run_dir)] == ["run_stopped"]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"kind": "metrics", "iteration": 1, "loss": 1.0, "mood": 2.0}, "metrics.mood"),
        ({"kind": "metrics", "iteration": 1, "grad_norm": 1.0}, "metrics.loss: is required"),
        ({"kind": "lunch"}, "kind='lunch'"),
        ({"kind": "evaluation", "iteration": 1}, "evaluation.loss"),
    ],
)
def test_what_is_no_record_is_kept_and_reported(
    config: JobConfig, run_dir: Path, clock: FakeClock, record: dict[str, object], problem: str
) -> None:
    stream = io.StringIO()
    sinks = open_sinks(config, run_dir, world_size=2, clock=clock, stream=stream)
    sinks.write(record)
    sinks.close(0, "done")
    (refused, _) = read_events(run_dir)
    assert refused.kind == "record_refused" and problem in refused.problem and record["kind"] in refused.content
    assert problem in stream.getvalue()
    assert summary(run_dir)["refused_records"] == 1


def test_a_failing_sink_is_reported_once_and_the_others_go_on(clock: FakeClock) -> None:
    bad, good = Remembering("bad"), Remembering("good")
    sinks = SinkSet([bad, good], clock=clock)
    bad.broken = True
    for iteration in (1, 2, 3):
        sinks.write(metrics_record(iteration))
    assert good.kinds == ["sink_failed", "metrics", "metrics", "metrics"]
    assert sinks.failed == {"bad": "RuntimeError: out of order"}
    bad.broken = False
    sinks.write(metrics_record(4))
    assert good.kinds[4:] == ["sink_recovered", "metrics"]
    assert bad.kinds == ["metrics", "sink_recovered"] and not sinks.failed


def test_a_sink_that_does_not_retry_is_left_alone(clock: FakeClock) -> None:
    bad, good = Remembering("bad", retries=False), Remembering("good")
    sinks = SinkSet([good, bad], clock=clock)
    bad.broken = True
    for iteration in (1, 2, 3):
        sinks.write(metrics_record(iteration))
    assert bad.num_calls == 1
    sinks.close(0, "done")
    assert bad.closed is not None


def test_all_sinks_failing_raises_nothing(clock: FakeClock) -> None:
    every = [Remembering(name) for name in "abc"]
    for sink in every:
        sink.broken = sink.breaks_on_close = True
    sinks = SinkSet(every, clock=clock)
    sinks.write(metrics_record(1))
    sinks.close(0, "done")
    assert set(sinks.failed) == set("abc")


def test_a_failure_to_close_reaches_the_sinks_after_it(clock: FakeClock) -> None:
    before, bad, after = Remembering("before"), Remembering("bad"), Remembering("after")
    bad.breaks_on_close = True
    SinkSet([before, bad, after], clock=clock).close(0, "done")
    assert after.kinds == ["run_finished", "sink_failed"] and before.kinds == ["run_finished"]
    assert after.closed is not None


def test_a_full_disk_is_seen_on_the_terminal_and_in_the_summary(
    config: JobConfig, run_dir: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ft.telemetry.sinks.jsonl import JsonlSink

    append = JsonlSink._append

    def refuse_metrics(self: JsonlSink, line: bytes) -> None:
        if self.name == "metrics.jsonl":
            raise OSError(28, "No space left on device")
        append(self, line)

    stream = io.StringIO()
    sinks = open_sinks(config, run_dir, world_size=2, clock=clock, stream=stream)
    monkeypatch.setattr(JsonlSink, "_append", refuse_metrics)
    for record in run_records(1, 4):
        sinks.write(record)
    sinks.close(0, "done")
    assert stream.getvalue().count("sink metrics.jsonl no longer accepts records: OSError: [Errno 28]") == 1
    assert [event.kind for event in read_events(run_dir)].count("sink_failed") == 1
    assert list(summary(run_dir)["failed_sinks"]) == ["metrics.jsonl"]


def test_threads_may_report_at_once(config: JobConfig, run_dir: Path, clock: FakeClock) -> None:
    sinks = open_sinks(config, run_dir, world_size=2, clock=clock, stream=io.StringIO())

    def report(start: int) -> None:
        for iteration in range(start, start + 50):
            sinks.write(metrics_record(iteration))

    threads = [threading.Thread(target=report, args=(start,)) for start in (1, 51, 101, 151)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sinks.close(0, "done")
    assert [metrics.iteration for metrics in read_metrics(run_dir)] == list(range(1, 201))


def test_a_log_file_that_cannot_be_opened_is_an_error_at_start(config: JobConfig, run_dir: Path) -> None:
    (run_dir / "events.jsonl").mkdir(parents=True)
    with pytest.raises(OSError, match=r"events\.jsonl"):
        open_sinks(config, run_dir, world_size=2)


def test_importing_telemetry_imports_neither_torch_nor_wandb_nor_rich() -> None:
    code = (
        "import sys, megatron_ft.telemetry, megatron_ft.telemetry.read;"
        "print([name for name in ('torch', 'wandb', 'rich', 'hydra', 'omegaconf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"

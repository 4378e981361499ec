"""The contract of all sinks. A new sink joins with a row in ``FACTORIES``."""

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_ft import events
from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.events import Record
from megatron_ft.planning.alerts import AlertLimits
from megatron_ft.telemetry.alerts import AlertSink, free_share
from megatron_ft.telemetry.jsonl import JsonlSink
from megatron_ft.telemetry.sink import Outcome, Sink
from megatron_ft.telemetry.state import RunState
from megatron_ft.telemetry.summary import SummarySink
from megatron_ft.telemetry.terminal import TerminalSink
from megatron_ft.telemetry.wandb_sink import WandbSink


def state() -> RunState:
    return RunState(time_opened_seconds=0.0, train_iterations=10)


def terminal(progress: str) -> Callable[[Path], Sink]:
    return lambda folder: TerminalSink(progress, title="trial", state=state(), stream=io.StringIO())


LIMITS = AlertLimits(single_loss_survival=1.0, stall_share=0.05, windows_behind=3.0, free_disk_share=0.05)
FACTORIES: dict[str, Callable[[Path], Sink]] = {
    "metrics.jsonl": lambda folder: JsonlSink(folder / "metrics.jsonl", metrics=True),
    "events.jsonl": lambda folder: JsonlSink(folder / "events.jsonl", metrics=False),
    "alerts": lambda folder: AlertSink(LIMITS, free_disk_share=partial(free_share, folder)),
    "summary.json": lambda folder: SummarySink(folder, world_size=2, state=state()),
    "terminal-plain": terminal("plain"),
    "terminal-live": terminal("live"),
    "wandb": lambda folder: WandbSink(TelemetryConfig(wandb="offline"), folder, job={}),
}
EXAMPLES: list[Record] = [
    events.RunStarted(run_name="trial", model="moe_micro", world_size=2),
    events.Metrics(iteration=1, values={"loss": 5.0}),
    events.Metrics(iteration=2, values={"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.0}),
    events.ExpertLoad(iteration=2, layers=((3, 1), (0, 0))),
    events.ExpertLoad(iteration=2, layers=()),
    events.ExpertLoad(iteration=2, layers=((7,) * 300,) * 40, layer_numbers=tuple(range(2, 42))),
    events.Evaluation(iteration=2, loss=float("inf")),
    events.StateDigest(iteration=2, digests=("0f1e", "2d3c")),
    events.IterationSkipped(iteration=3, reason="non_finite", values={"loss": float("nan")}),
    events.AlertRaised(alert="stall_share", value=0.2, limit=0.05, iteration=3),
    events.AlertCleared(alert="stall_share", value=0.01, limit=0.05, iteration=4),
    events.PlacementInForce(iteration=3, reason="first", stages=("spread",)),
    events.RecoveryDecided(generation=1, rung="checkpoint", iteration=4, declined=("window of iteration 8",)),
    events.MembershipChanged(
        generation=1, world_size=3, nodes=(0, 1, 3), reason="rank 2 was killed", iteration=2, seconds=1.5
    ),
    events.StageRecovery(
        generation=1,
        rank=2,
        stage=1,
        role="replays",
        start_iteration=7,
        iteration=12,
        num_iterations=5,
        num_forward_passes=40,
        bytes_moved=1_000,
        began_unix_seconds=1_700_000_000.0,
        seconds=0.8,
    ),
    events.ControllerReplaced(reason="the controller is gone: it was killed by SIGKILL"),
    events.ControllerWaits(problem="[Errno 28] No space left on device"),
    events.ControllerGoesOn(seconds=8.2),
    events.RunFolderMissing(path="/runs/one"),
    events.CheckpointSaved(iteration=3, num_bytes=12_345_678, seconds=0.5),
    events.CheckpointFailed(iteration=4, error="[Errno 28] No space left on device"),
    events.CheckpointLoaded(iteration=3),
    events.LossSpike(iteration=4, loss=9.0, median=3.0),
    events.FailpointHit(action="kill", phase="backward", iteration=4, rank=1),
    events.FailpointUnfired(failpoint="kill(phase='gather')", rank=1),
    events.RankFailed(rank=1, node=0, signal="SIGKILL", first=True),
    events.RankFailed(rank=0, exit_code=1, error="ValueError: [bold]not markup[/bold]"),
    events.SnapshotPlanned(
        iteration=3,
        window_iterations=4,
        interval_iterations=4,
        window_bytes=1 << 20,
        dense_bytes=1 << 20,
        host_bytes=1 << 23,
        reason="HardCount order",
    ),
    events.WindowCommitted(iteration=8, start_iteration=4, num_iterations=4, stalled_seconds=0.01),
    events.WindowDelayed(iteration=8, replicating_bytes=1 << 20),
    events.UpstreamLogPlanned(iteration=3, iterations_kept=12, log_bytes=1 << 20, node_bytes=1 << 23),
    events.UpstreamLogFull(iteration=16, iterations_kept=12),
    events.SnapshotProblem(iteration=8, node=1, what="persist", error="No space left on device"),
    events.RecoveryChosen(source="memory", iteration=7, declined=("memory window of iteration 8: incomplete",)),
    events.WindowReplayed(iteration=7, start_iteration=4, num_iterations=3, seconds=1.5),
    events.StageRecovery(
        generation=1,
        rank=1,
        stage=0,
        role="replays",
        start_iteration=4,
        iteration=7,
        num_iterations=3,
        num_forward_passes=12,
        bytes_moved=1 << 20,
        began_unix_seconds=1_700_000_000.0,
        seconds=1.5,
    ),
    events.NodeLost(node=2, reason="no sign of its process"),
    events.NodeStartFailed(node=2, reason="its process exited with code 8", starts_again=True),
    events.RanksRestarted(generation=1, reason="rank 1 raised", failed_ranks=(1,), iteration=4, num_restarts_left=0),
    events.StopRequested(source="SIGTERM"),
    events.RanksReady(seconds=1.5),
    events.SinkFailed(sink="wandb", error="ImportError: no module"),
    events.SinkRecovered(sink="metrics.jsonl", num_lost_records=0),
    events.RecordRefused(problem="metrics.mood: is not listed", content="{}"),
    events.LogHealed(file="metrics.jsonl", num_dropped_bytes=17),
    events.RunFinished(exit_code=0, reason="all iterations done"),
    events.RunStopped(exit_code=130, reason="SIGINT"),
]
ENDED = Outcome(exit_code=0, reason="all iterations done", time_unix_seconds=100.0)


@pytest.fixture(params=FACTORIES, ids=FACTORIES.keys())
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    if request.param == "wandb":
        request.applymarker(pytest.mark.wandb)
        pytest.importorskip("wandb")
    return FACTORIES[request.param](tmp_path)


def test_examples_show_every_kind() -> None:
    assert {record.kind for record in EXAMPLES} == set(events.RECORDS)


def test_takes_every_kind_of_record_and_closes(sink: Sink) -> None:
    for record in EXAMPLES:
        sink.write(record)
    assert sink.num_lost_records == 0
    sink.close(ENDED)


def test_closes_without_a_record(sink: Sink) -> None:
    sink.close(ENDED)


def test_a_record_costs_less_than_a_millisecond(sink: Sink) -> None:
    """CPU time of the calling thread, which is the one that could hold training up."""
    load = events.ExpertLoad(iteration=1, layers=((100,) * 16,) * 8)
    start = time.thread_time()
    for iteration in range(1, 201):
        sink.write(events.Metrics(iteration=iteration, values={"loss": 5.0, "tokens": 2048, "iteration_seconds": 0.5}))
        sink.write(load)
    cost_seconds = (time.thread_time() - start) / 400
    sink.close(ENDED)
    assert cost_seconds < 1e-3, f"{cost_seconds * 1e6:.0f} microseconds per record"

"""Tests the output on the terminal."""

import io
import re

import pytest
from rich.console import Console

from megatron_ft import events
from megatron_ft.events import Note, Record
from megatron_ft.formatting import clock, seconds, size
from megatron_ft.telemetry.sinks.base import Outcome
from megatron_ft.telemetry.sinks.terminal import ASCII, BLOCKS, TerminalSink, _panel, _PanelStyle, _Symbols, _TimedNote
from megatron_ft.telemetry.state import RunState
from megatron_ft.testing.made_up_runs import RUN_STARTED, metrics_record, run_records


def fold(records: list[Record], train_iterations: int = 12) -> RunState:
    state = RunState(time_opened_seconds=1000.0, train_iterations=train_iterations)
    for record in records:
        state.take(record)
    return state


def some_records(last: int = 8) -> list[Record]:
    raw = list(run_records(1, last))
    return [Record.from_record(record | {"time_unix_seconds": 1000.0 + record["iteration"]}) for record in raw]


def render(
    state: RunState, *, width: int = 100, height: int = 40, symbols: _Symbols = BLOCKS, notes: int = 3
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, legacy_windows=False)
    reported = [
        _TimedNote(time_unix_seconds=1000.0, note=Note(level="good", text=f"event {number} [red]literally[/red]"))
        for number in range(notes)
    ]
    style = _PanelStyle(title="trial-001", width=width, height=height, symbols=symbols)
    console.print(_panel(state, reported, style, now_seconds=1030.0))
    return console.file.getvalue().splitlines()


def stage_recovery(role: str) -> events.StageRecovery:
    return events.StageRecovery(
        generation=1,
        rank=2,
        stage=1,
        role=role,
        start_iteration=7,
        iteration=12,
        num_iterations=5,
        num_forward_passes=40,
        bytes_moved=1_000,
        began_unix_seconds=1_700_000_000.0,
        seconds=0.8,
    )


def test_panel_shows_the_run() -> None:
    text = "\n".join(render(fold(some_records())))
    for shown in ("trial-001", "8 / 12", "0:30 elapsed", "0:04 left", "0.6250", "0.6375 @ 8", "4,096", "1.00e-03"):
        assert shown in text, shown
    assert "event 2 [red]literally[/red]" in text
    assert re.search(r"layer +2 .*busiest 4\.00 x", text)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_panel_lines_are_of_one_width(width: int) -> None:
    assert {len(line) for line in render(fold(some_records()), width=width)} == {min(width, 120)}


def test_panel_keeps_its_height_as_events_come() -> None:
    state = fold(some_records())
    assert len(render(state, notes=0)) == len(render(state, notes=5)) == len(render(state, notes=50))


@pytest.mark.parametrize("height", [24, 30])
@pytest.mark.parametrize("num_layers", [4, 48])
def test_panel_fits_a_small_terminal(num_layers: int, height: int) -> None:
    load = events.ExpertLoad(iteration=8, layers=((5,) * 160,) * num_layers)
    state = fold([*some_records(), load])
    lines = render(state, width=80, height=height)
    assert len(lines) < height
    assert sum("busiest" in line for line in lines) >= 4


def test_panel_shows_whole_process_ids_in_80_columns() -> None:
    process_ids = tuple(range(4_000_000, 4_000_008))
    note = events.RanksReady(seconds=12.3, world_size=8, process_ids=process_ids).describe()
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=False, legacy_windows=False)
    style = _PanelStyle(title="t", width=80, height=40, symbols=BLOCKS)
    reported = [_TimedNote(time_unix_seconds=1000.0, note=note)]
    console.print(_panel(fold(some_records()), reported, style, now_seconds=1030.0))
    lines = console.file.getvalue().splitlines()
    assert all(str(process_id) in "\n".join(lines) for process_id in process_ids)
    assert len(lines) == len(render(fold(some_records()), width=80)) and {len(line) for line in lines} == {80}


def test_panel_says_how_well_the_run_goes_so_far() -> None:
    def at(seconds: float, record: dict[str, object]) -> Record:
        return Record.from_record({"time_unix_seconds": 1_700_000_000.0 + seconds} | record)

    output = [
        at(0.0, RUN_STARTED),
        at(
            0.0, {"kind": "placement_in_force", "iteration": 1, "reason": "", "stages": [], "single_loss_survival": 1.0}
        ),
        at(0.5, metrics_record(1)),
        at(0.6, {"kind": "recovery_started", "generation": 1, "strategy": "living_state", "iteration": 1}),
        at(4.0, metrics_record(2)),
    ]
    (row,) = [line for line in render(fold(output)) if "so far" in line]
    assert "ETTR 25.0 % · 1 interruption · survives the next loss: 100 %" in row


def test_panel_of_a_run_that_reported_nothing_yet() -> None:
    text = "\n".join(render(fold([]), notes=0))
    assert "0 / 12" in text and "-:-- left" in text and "none reported yet" in text


def test_panel_in_ascii() -> None:
    for line in render(fold(some_records()), symbols=ASCII):
        line.encode("ascii")


def test_panel_says_degraded_until_recovered() -> None:
    failed = events.SinkFailed(sink="metrics.jsonl", error="OSError: No space left")
    state = fold([*some_records(), failed])
    assert any("DEGRADED: metrics.jsonl" in line for line in render(state))
    state.take(events.SinkRecovered(sink="metrics.jsonl", num_lost_records=0))
    assert not any("DEGRADED" in line for line in render(state))


def test_loss_curve_covers_the_whole_run() -> None:
    curve = fold(some_records(last=6), train_iterations=12).loss_curve(24)
    assert curve[0] == curve[1] == 5.0 and curve[11] == 5.0 / 6 and curve[12:] == [None] * 12


def test_loss_curve_of_a_long_run_keeps_few_figures() -> None:
    state = RunState(time_opened_seconds=0.0, train_iterations=100_000)
    for iteration in range(1, 100_001, 10):
        state.take(events.Metrics(iteration=iteration, values={"loss": float(iteration)}))
    curve = state.loss_curve(10)
    assert len(state._bins) <= 480 and None not in curve and curve == sorted(curve)


def test_remaining_time_follows_the_recent_pace() -> None:
    state = RunState(time_opened_seconds=0.0, train_iterations=100)
    for iteration in range(1, 51):
        moment = iteration * 10.0 if iteration <= 20 else 200.0 + (iteration - 20) * 2.0
        state.take(events.Metrics(iteration=iteration, values={"loss": 1.0}, time_unix_seconds=moment))
    assert state.remaining_seconds() == pytest.approx(100.0)


class Plain:
    """Plain terminal with a clock that the test advances."""

    def __init__(self, train_iterations: int) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.sink = TerminalSink(
            "auto",
            title="trial",
            state=RunState(time_opened_seconds=0.0, train_iterations=train_iterations),
            clock=lambda: self.now,
            stream=self.stream,
        )

    def train(self, num_iterations: int, seconds_each: float) -> None:
        for iteration in range(1, num_iterations + 1):
            self.now += seconds_each
            record = events.Metrics(iteration=iteration, values={"loss": 1.0}, time_unix_seconds=self.now)
            self.sink.write(record)

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_plain_lines_tell_each_iteration_of_a_short_run() -> None:
    terminal = Plain(60)
    terminal.train(60, 3.0)
    assert sum("iteration" in line for line in terminal.lines()) == 60


def test_plain_lines_of_a_week_are_at_most_one_a_minute_and_the_last_is_reported() -> None:
    terminal = Plain(60_480)
    terminal.train(60_480, 10.0)
    terminal.sink.write(events.RunFinished(exit_code=0, reason="all done", time_unix_seconds=terminal.now))
    terminal.sink.close(Outcome(exit_code=0, reason="all done", time_unix_seconds=terminal.now))
    lines = terminal.lines()
    assert 9_000 < len(lines) < 11_000
    assert sum("60480/60480" in line for line in lines) == 1
    assert "60480/60480" in lines[-3] and "all done" in lines[-2] and lines[-1].startswith("60480 iterations")


def test_plain_lines_of_fast_iterations_are_few() -> None:
    terminal = Plain(100_000)
    terminal.train(100_000, 0.01)
    assert len(terminal.lines()) < 1_000


def test_the_last_iteration_is_reported_before_what_comes_after_it() -> None:
    terminal = Plain(50_000)
    terminal.train(50_000, 0.01)
    terminal.sink.write(events.CheckpointSaved(iteration=50_000))
    assert ["50000/50000" in line for line in terminal.lines()[-2:]] == [True, False]


def test_an_iteration_left_out_is_reported_before_an_event_about_it() -> None:
    terminal = Plain(100_000)
    terminal.train(50_001, 0.01)
    terminal.sink.write(events.Evaluation(iteration=50_000, loss=1.0))
    assert "50001/100000" not in terminal.lines()[-2], "of another iteration"
    terminal.sink.write(events.CheckpointSaved(iteration=50_001))
    assert ["iteration  50001/100000" in line for line in terminal.lines()[-2:]] == [True, False]


def test_plain_output_has_no_control_characters() -> None:
    terminal = Plain(12)
    for record in some_records():
        terminal.sink.write(record)
    terminal.sink.close(Outcome(exit_code=0, reason="done", time_unix_seconds=9.0))
    assert "\x1b" not in terminal.stream.getvalue()


def test_live_output_leaves_the_last_state_on_the_screen() -> None:
    stream = io.StringIO()
    state = RunState(time_opened_seconds=1000.0, train_iterations=8)
    sink = TerminalSink("live", title="trial", state=state, clock=lambda: 1010.0, stream=stream)
    for record in some_records():
        sink.write(record)
    sink.close(Outcome(exit_code=0, reason="done", time_unix_seconds=1010.0))
    tail = stream.getvalue()[-6000:]
    assert "8 / 8" in tail and tail.rstrip().endswith("4,096 tokens/s")


def test_an_iteration_that_is_not_a_number_is_shown() -> None:
    record = events.Metrics(iteration=1, values={"loss": float("nan"), "grad_norm": float("inf")})
    assert any("nan" in line for line in render(fold([record])))


@pytest.mark.parametrize(
    ("record", "level", "text"),
    [
        (
            events.RankFailed(rank=3, node=1, signal="SIGKILL", first=True, iteration=7),
            "bad",
            "rank 3 on node 1 died in iteration 7 (SIGKILL, the first to fail)",
        ),
        (
            events.RankFailed(rank=3, exit_code=1, error="ValueError: no"),
            "bad",
            "rank 3 died (exit code 1): ValueError: no",
        ),
        (
            events.CheckpointSaved(iteration=30, num_bytes=3_200_000, seconds=0.4),
            "good",
            "checkpoint of iteration 30 saved: 3.2 MB in 0.40 s",
        ),
        (
            events.RanksRestarted(
                generation=2, reason="rank 3 raised", failed_ranks=(3,), iteration=7, num_restarts_left=1
            ),
            "warning",
            "starting all ranks again (generation 2; restarts left without progress: 1): rank 3 raised in iteration 7",
        ),
        (events.RunStarted(run_name="r", model="m", world_size=1), "info", "r: m, 1 rank"),
        (
            events.RunStarted(
                run_name="r", model="m", world_size=4, num_nodes=2, device="cpu", resumed_from_iteration=30
            ),
            "info",
            "r: m, 4 ranks on 2 nodes, cpu, continues after iteration 30",
        ),
        (
            events.SinkRecovered(sink="metrics.jsonl", num_lost_records=2),
            "good",
            "sink metrics.jsonl works again; lost records: 2",
        ),
        (
            events.UpstreamLogPlanned(iteration=3, iterations_kept=12, log_bytes=3_200_000, node_bytes=12_800_000),
            "info",
            "upstream log: space for 12 iterations, at most 3.2 MB per rank",
        ),
        (
            events.UpstreamLogFull(iteration=16, iterations_kept=12),
            "warning",
            "the upstream log has no space for iteration 16: "
            "no stage can replay alone until a later window is committed",
        ),
        (events.RanksReady(seconds=0.42), "info", "all ranks ready after 0.42 s"),
        (
            events.RanksReady(seconds=0.42, process_ids=(31, 30)),
            "info",
            "all ranks ready after 0.42 s; process ids by rank: 31 30",
        ),
        (
            events.RanksReady(seconds=0.42, process_ids=tuple(range(9))),
            "info",
            "all ranks ready after 0.42 s",
        ),
        (stage_recovery("replays"), "good", "rank 2 of stage 1 replayed 5 iterations up to 12 in 0.80 s"),
    ],
)
def test_events_describe_themselves(record: Record, level: str, text: str) -> None:
    assert record.describe() == Note(level=level, text=text)


@pytest.mark.parametrize("role", ["serves", "waits"])
def test_ranks_that_stand_still_in_a_recovery_fill_no_lines(role: str) -> None:
    assert stage_recovery(role).describe() is None


def test_durations_and_sizes() -> None:
    assert [seconds(value) for value in (0.421, 12.34, 61.0)] == ["0.42 s", "12.3 s", "1:01"]
    assert [clock(value) for value in (7, 247, 3723, 273_906)] == ["0:07", "4:07", "1:02:03", "3d 04:05:06"]
    assert [size(value) for value in (512, 3_200_000, 7e12)] == ["512 B", "3.2 MB", "7.0 TB"]

"""Tests lines on disk: exact floats, incomplete last lines, and a disk that refuses writes."""

import errno
import json
import os
from pathlib import Path

import pytest

from megatron_ft import durable
from megatron_ft.events import Evaluation, LogTruncated, Metrics
from megatron_ft.telemetry.sinks import jsonl
from megatron_ft.telemetry.sinks.base import Outcome
from megatron_ft.telemetry.sinks.jsonl import JsonlSink

ENDED = Outcome(exit_code=0, reason="done", time_unix_seconds=0.0)


def metrics(iteration: int, loss: float = 1.0) -> Metrics:
    return Metrics(iteration=iteration, values={"loss": loss})


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_lines_are_strict_json_with_exact_floats(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", metrics=True)
    values = [0.1 + 0.2, 1 / 3, 5e-324, float("nan"), float("-inf")]
    for iteration, value in enumerate(values, start=1):
        sink.write(metrics(iteration, value))
    sink.close(ENDED)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line, parse_constant=refuse)["loss"] for line in lines]
    assert losses == [0.1 + 0.2, 1 / 3, 5e-324, "NaN", "-Infinity"]


def test_a_line_is_visible_as_soon_as_write_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", metrics=True)
    sink.write(metrics(1))
    assert iterations(tmp_path / "metrics.jsonl") == [1]
    sink.close(ENDED)


def test_each_file_takes_its_own_kinds(tmp_path: Path) -> None:
    sinks = [JsonlSink(tmp_path / "m", metrics=True), JsonlSink(tmp_path / "e", metrics=False)]
    for sink in sinks:
        sink.write(metrics(1))
        sink.write(Evaluation(iteration=2, loss=1.0))
        sink.close(ENDED)
    assert iterations(tmp_path / "m") == [1]
    assert iterations(tmp_path / "e") == [2]


def test_events_are_forced_to_disk_metrics_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    metrics_sink = JsonlSink(tmp_path / "m", metrics=True)
    metrics_sink.write(metrics(1))
    assert not synced
    events_sink = JsonlSink(tmp_path / "e", metrics=False)
    events_sink.write(Evaluation(iteration=2, loss=1.0))
    assert len(synced) == 1
    metrics_sink.close(ENDED)
    events_sink.close(ENDED)
    assert len(synced) == 3


@pytest.mark.parametrize("tail", [b'{"kind":"met', b"x" * (3 * durable._CHUNK_BYTES + 7), b"\0" * 512])
@pytest.mark.parametrize("num_whole", [0, 1, 3])
def test_a_torn_last_line_is_cut_off_and_reported(tmp_path: Path, num_whole: int, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [b'{"kind":"metrics","iteration":%d,"loss":1.0}\n' % iteration for iteration in range(1, num_whole + 1)]
    path.write_bytes(b"".join(whole) + tail)
    sink = JsonlSink(path, metrics=True)
    assert sink.take_reports() == [LogTruncated(file="metrics.jsonl", num_dropped_bytes=len(tail))]
    sink.write(metrics(num_whole + 1))
    sink.close(ENDED)
    assert iterations(path) == list(range(1, num_whole + 2))


def test_a_whole_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"metrics","iteration":1,"loss":1.0}\n')
    sink = JsonlSink(path, metrics=True)
    assert sink.take_reports() == []
    sink.close(ENDED)
    assert iterations(path) == [1]


class FullDisk:
    """Writes half of each write and then fails, as long as ``full`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self._write = os.write
        monkeypatch.setattr(jsonl.os, "write", self)
        self._num_calls = 0

    def __call__(self, file: int, data: bytes) -> int:
        if not self.full:
            return self._write(file, data)
        self._num_calls += 1
        if self._num_calls % 2:
            return self._write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_nothing_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, metrics=True)
    sink.write(metrics(1))
    disk.full = True
    for iteration in (2, 3, 4):
        with pytest.raises(OSError, match="No space left"):
            sink.write(metrics(iteration))
        assert iterations(path) == [1], "no half line stays"
    disk.full = False
    sink.write(metrics(5))
    assert iterations(path) == [1, 2, 3, 4, 5]
    assert sink.num_lost_records == 0
    sink.close(ENDED)


def test_a_disk_full_for_long_loses_the_oldest_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_PENDING_LINES", 3)
    disk = FullDisk(monkeypatch)
    sink = JsonlSink(tmp_path / "metrics.jsonl", metrics=True)
    disk.full = True
    for iteration in range(1, 6):
        with pytest.raises(OSError):
            sink.write(metrics(iteration))
    disk.full = False
    sink.close(ENDED)
    assert iterations(tmp_path / "metrics.jsonl") == [3, 4, 5]
    assert sink.num_lost_records == 2

"""Tests reading the records of a run."""

import json
from pathlib import Path

import pytest

from megatron_ft.telemetry.read import first_metrics, read_metrics
from megatron_ft.testing.made_up_runs import metrics_record


def write(folder: Path, *lines: str, end: str = "\n") -> None:
    (folder / "metrics.jsonl").write_text("\n".join(lines) + end)


def line(iteration: int, loss: float = 1.0) -> str:
    return json.dumps(metrics_record(iteration, loss))


def test_the_newest_record_of_each_iteration_in_order(tmp_path: Path) -> None:
    write(tmp_path, line(1, 10.0), line(2, 20.0), line(3, 30.0), line(2, 21.0), line(3, 31.0), line(4, 41.0))
    assert [metrics.values["loss"] for metrics in read_metrics(tmp_path)] == [10.0, 21.0, 31.0, 41.0]
    assert first_metrics(tmp_path).values["loss"] == 10.0


def test_a_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, line(1), line(2)[:20], end="")
    assert [metrics.iteration for metrics in read_metrics(tmp_path)] == [1]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    write(tmp_path, line(1), line(2)[:20], line(3))
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: "):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("3", "int: must be a JSON object"),
        ('{"kind":"ranks_ready","seconds":1.0}', "must be one of metrics"),
        ("[" * 100_000, "the JSON text is nested too deeply"),
        ("\udcff", "utf-8"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, damage: str, reason: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(f"{line(1)}\n{damage}\n{line(3)}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"metrics\.jsonl:2: .*{reason}"):
        read_metrics(tmp_path)


def test_an_empty_file_has_no_metrics(tmp_path: Path) -> None:
    write(tmp_path, end="")
    assert read_metrics(tmp_path) == [] and first_metrics(tmp_path) is None


def test_a_run_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path)

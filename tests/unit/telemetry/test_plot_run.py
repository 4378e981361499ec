"""Tests the picture of a run."""

import io
import sys
from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.telemetry import open_sinks
from megatron_ft.testing.made_up_runs import RUN_STARTED, run_records
from tools import plot_run


@pytest.fixture
def finished_run(config: JobConfig, run_dir: Path) -> Path:
    sinks = open_sinks(config, run_dir, world_size=2, stream=io.StringIO())
    for record in [RUN_STARTED, *run_records(1, 6), RUN_STARTED | {"resumed_from_iteration": 4}, *run_records(5, 12)]:
        sinks.write(record)
    sinks.close(0, "done")
    return run_dir


def test_draws_loss_evaluations_and_a_map_per_layer(finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the docs extra")
    metrics, events = plot_run.read_run(finished_run)
    figure = plot_run.draw(metrics, events, title="trial")
    above, below = figure.subfigs
    training, evaluation, resumed = above.axes[0].get_lines()
    assert list(training.get_xdata()) == list(range(1, 13))
    assert list(evaluation.get_xdata()) == [4, 8, 12]
    assert list(resumed.get_xdata()) == [4, 4]
    maps = [axes.images[0] for axes in below.axes if axes.images]
    assert [image.get_array().shape for image in maps] == [(4, 12), (4, 12)]
    assert maps[1].get_array()[0].tolist() == [4.0] * 12

    picture = tmp_path / "run.png"
    assert plot_run.main([str(finished_run), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_draws_a_dense_run_without_expert_load(finished_run: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the docs extra")
    metrics, _ = plot_run.read_run(finished_run)
    assert len(plot_run.draw(metrics, [], title="trial").axes) == 3


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_run.main([str(tmp_path), "--out", str(tmp_path / "run.png")]) == 3
    assert f"run_dir={tmp_path}: must be the folder of a run" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_run.main([str(finished_run), "--out", str(tmp_path / "run.png")]) == 4
    assert "pip install -e '.[docs]'" in capsys.readouterr().err


def test_the_picture_is_in_the_folder_of_the_run_by_default(finished_run: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the docs extra")
    assert plot_run.main([str(finished_run)]) == 0
    assert (finished_run / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["gone/run.png", "run.unknown"])
def test_a_picture_that_cannot_be_written_is_refused(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the docs extra")
    assert plot_run.main([str(finished_run), "--out", str(tmp_path / name)]) == 2
    assert f"--out={tmp_path / name}: must be a writable file" in capsys.readouterr().err

"""Tests the command that writes a run's page."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY as ROOT
from megatron_ft.testing.made_up_runs import MadeUpRun, localized
from tools import report


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    made_up = MadeUpRun(tmp_path / "trial-001")
    localized(made_up)
    return made_up


def test_writes_the_page_into_the_folder_of_the_run(run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(run.path)]) == 0
    page = run.path / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text(encoding="utf-8") == run.page()
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []


def test_writes_it_elsewhere_and_over_an_older_one(run: MadeUpRun, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("older")
    assert report.main([str(run.path), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert not (run.path / "report.html").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 3
    assert f"report: run_dir={tmp_path}: must be the folder of a run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_damage_is_one_line_with_its_place(run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.path / "events.jsonl"
    first, _, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, "{torn", *rest]) + "\n")
    assert report.main([str(run.path)]) == 3
    output = capsys.readouterr().err
    assert f"{path}:2: " in output and output.count("\n") == 1
    assert not (run.path / "report.html").exists()


def test_a_place_that_cannot_be_written_is_refused(
    run: MadeUpRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / "page.html"
    assert report.main([str(run.path), "--out", str(out)]) == 2
    assert f"--out={out}: must be a writable file" in capsys.readouterr().err


WITHOUT_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert end.code == 0, end.code
assert not {"torch", "hydra", "grpc"} & sys.modules.keys()
"""


def test_it_runs_as_a_file_from_anywhere_and_needs_no_torch(run: MadeUpRun) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / "tools" / "report.py"), str(run.path)]
    subprocess.run(command, check=True, cwd=run.path)
    assert (run.path / "report.html").exists()


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether ``condition`` becomes true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_a_living_run_is_followed_to_its_end(run: MadeUpRun) -> None:
    events = run.path / "events.jsonl"
    *living, last = events.read_text().splitlines(keepends=True)
    events.write_text("".join(living))
    page = run.path / "report.html"
    command = [sys.executable, "-m", "tools.report", str(run.path), "--live", "--every", "1", "--patience", "60"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: page.exists() and 'http-equiv="refresh" content="1"' in page.read_text())
            with events.open("a") as lines:
                lines.write(last)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    assert page.read_text() == run.page(), "the last one is no longer read again"


def test_a_run_that_reports_nothing_is_given_up(run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    events = run.path / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))
    assert report.main([str(run.path), "--live", "--every", "1", "--patience", "1"]) == 0
    assert "has reported nothing for 1 s" in capsys.readouterr().err
    assert (run.path / "report.html").read_text() == run.page()


@pytest.mark.parametrize("wrong", ["0", "86401", "soon"])
def test_times_that_cannot_be_are_refused(run: MadeUpRun, wrong: str) -> None:
    with pytest.raises(SystemExit) as refused:
        report.main([str(run.path), "--live", "--every", wrong])
    assert refused.value.code == 2

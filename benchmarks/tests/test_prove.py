"""Tests that a claim ends with one line, a matching exit code, and a stored result that the tables show."""

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prove, tables
from benchmarks.claims import Claim, load_claims, newest_results
from benchmarks.hardware import hardware_class
from benchmarks.quickstart import Observed
from benchmarks.source import ROOT
from megatron_ft.errors import ConfigError

CLAIM = Claim(
    id="speed",
    short="speed of a claim",
    statement="It is fast.",
    command="python -m fake_claim",
    quick="python -m fake_claim --quick",
    quick_is="fast",
    threshold="<= 3 s",
    hardware=("cpu", "h200"),
    timeout_seconds=30,
)
SCRIPT = """
import json, pathlib, sys
result = {{"id": "speed", "passed": {passed}, "figure": "2 s", "threshold": "{threshold}", "counts": {{"runs": 1}}}}
result["details"] = {{}}
pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(result))
sys.exit({code})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def measure(
    folder: Path, *, passed: bool = True, code: int = 0, threshold: str = "<= 3 s", quick: bool = False
) -> tuple[str, bool]:
    (folder / "fake_claim.py").write_text(SCRIPT.format(passed=passed, code=code, threshold=threshold))
    return prove.prove(CLAIM, quick=quick, results_dir=folder / "results", root=folder)


def test_a_passed_claim_is_stored_and_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert measure(folder) == ("speed PASS 2 s (<= 3 s)", True)
    assert capfd.readouterr().out.splitlines()[-1] == "speed PASS 2 s (<= 3 s)"
    (path,) = (folder / "results").glob("speed_*_20??-??-??.json")
    result = json.loads(path.read_text())
    assert result["hardware"]["num_cores"] >= 1
    assert str(folder) not in path.read_text()
    claim = dataclasses.replace(CLAIM, hardware=(result["hardware"]["class"],))
    shown = tables.short_table({"speed": claim}, newest_results(folder / "results"))
    row = f"| [`speed`](#speed) | speed of a claim | PASS | {result['hardware']['class']} | {result['date']} |"
    assert row in shown
    for source, output in (("", tables.AS_SHIPPED), ("changed = 1\n", tables.OLDER)):
        with (folder / "fake_claim.py").open("a") as script:
            script.write(source)
        shown = tables.full_table({"speed": claim}, newest_results(folder / "results"), root=folder)
        assert f"| source | {output} |" in shown


def test_a_table_of_a_result_is_shown(tmp_path: Path) -> None:
    (tmp_path / "fake_claim.py").touch()
    table = {"title": "By size", "header": ["size", "s"], "rows": [["1", "2.0"], ["4", "a|b"]]}
    result: dict[str, Any] = {"passed": True, "figure": "2 s", "date": "2026-01-01", "counts": {}, "wall_seconds": 3.0}
    facts = {"gpus": [], "num_cores": 2, "cpu_model": "x", "memory_bytes": 1 << 30, "python": "3", "torch": "2"}
    result |= {"hardware": {"class": "cpu", **facts}, "details": {"tables": [table]}}
    shown = tables.full_table({"speed": CLAIM}, {("speed", "cpu"): result}, root=tmp_path)
    assert shown.endswith(
        f"| took | 3 s |\n| source | {tables.OLDER} |\n\n"
        "By size:\n\n| size | s |\n|---|---|\n| 1 | 2.0 |\n| 4 | a\\|b |"
    )


def test_a_quick_run_stores_nothing(folder: Path) -> None:
    assert measure(folder, threshold="looser", quick=True) == ("speed PASS 2 s (looser)", True)
    assert not (folder / "results").exists()


@pytest.mark.parametrize(
    ("passed", "code", "threshold", "line"),
    [
        (False, 1, "<= 3 s", "speed FAIL 2 s (<= 3 s)"),
        (True, 1, "<= 3 s", "speed FAIL the result has passed=True, but the exit code is 1 (<= 3 s)"),
        (True, 0, "<= 9 s", "speed FAIL the result has the threshold '<= 9 s', but the claim has '<= 3 s' (<= 3 s)"),
    ],
)
def test_a_claim_that_does_not_hold_fails(folder: Path, passed: bool, code: int, threshold: str, line: str) -> None:
    assert measure(folder, passed=passed, code=code, threshold=threshold) == (line, False)


def test_a_script_without_result_fails(folder: Path) -> None:
    (folder / "fake_claim.py").write_text("raise SystemExit(5)")
    line, passed = prove.prove(CLAIM, quick=True)
    assert (line, passed) == ("speed FAIL the script wrote no result and ended with exit code 5 (<= 3 s)", False)


def test_a_script_that_takes_too_long_is_ended() -> None:
    # ``main`` handles SIGINT, too. Where a shell runs the tests in the background, scripts would inherit that it is
    # ignored, and only SIGKILL would end them, ``STOP_SECONDS`` later.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert prove.run_bounded([sys.executable, "-c", "import signal; signal.pause()"], 0.5) == (124, [])
    finally:
        signal.signal(signal.SIGINT, before)


CLEANING = """
import signal, sys
try:
    print("begun", flush=True)
    signal.pause()
finally:
    print("cleaned up", flush=True)
"""
DEAF = """trap 'echo asked' INT; echo begun; while :; do read -rt 60 <> <(:) || true; done"""
PROVING = """
import signal, sys
from benchmarks import prove
prove.STOP_SECONDS = float(sys.argv[1])
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[3]))
prove.clean_up_when_ended()
prove.run_bounded(sys.argv[4:], float(sys.argv[2]))
print("goes on")
"""


@contextmanager
def proving(
    *command: str, stop_seconds: float, timeout_seconds: float, on_hang_up: str = "SIG_DFL"
) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that measures ``command``, and wait until the command has begun. The standard output has the text
    of both."""
    words = [sys.executable, "-c", PROVING, str(stop_seconds), str(timeout_seconds), on_hang_up, *command]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_script_cleans_up_when_its_measuring_is_ended(number: signal.Signals) -> None:
    with proving(sys.executable, "-c", CLEANING, stop_seconds=60.0, timeout_seconds=60.0) as process:
        process.send_signal(number)
        output, _ = process.communicate()
    assert (output, process.returncode) == ("cleaned up\n", 128 + number)


def test_a_hang_up_that_is_ignored_ends_nothing() -> None:
    """Ignore SIGHUP as under nohup. The script ends only at its time limit."""
    limits = {"stop_seconds": 60.0, "timeout_seconds": 4.0}
    with proving(sys.executable, "-c", CLEANING, **limits, on_hang_up="SIG_IGN") as process:
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate()
    assert (output, process.returncode) == ("cleaned up\ngoes on\n", 0)


def test_a_script_that_does_not_clean_up_in_time_is_killed() -> None:
    with proving("bash", "-c", DEAF, stop_seconds=0.5, timeout_seconds=4.0) as process:
        output, _ = process.communicate()  # returns when both processes have ended
    assert (output, process.returncode) == ("asked\ngoes on\n", 0)


def test_who_is_asked_to_end_while_it_ends_a_script_leaves_nothing_behind_either() -> None:
    with proving("bash", "-c", DEAF, stop_seconds=3.0, timeout_seconds=4.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    assert (output, process.returncode) == ("", 128 + signal.SIGTERM)


def test_a_script_that_leaves_a_process_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "GRACE_SECONDS", 0.2)
    leave = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    (folder / "fake_claim.py").write_text(leave + SCRIPT.format(passed=True, code=0, threshold="<= 3 s"))
    assert prove.prove(CLAIM, quick=True) == ("speed FAIL processes left behind: 1; 2 s (<= 3 s)", False)


def test_a_claim_whose_data_is_not_there_is_refused_before_it_runs(folder: Path) -> None:
    claim = dataclasses.replace(CLAIM, needs="../nowhere/trace.csv")
    assert claim.missing is not None and claim.missing.endswith("nowhere/trace.csv")
    with pytest.raises(ConfigError, match=r"cannot be measured here: there is no file .*/trace\.csv"):
        prove.prove(claim, quick=True, results_dir=folder)
    assert dataclasses.replace(CLAIM, needs="README.md").missing is None


def _lacking() -> str:
    return "a cluster is needed"


def _lacking_nothing() -> None:
    pass


def test_a_claim_that_this_machine_cannot_run_is_refused_with_the_reason(folder: Path) -> None:
    claim = dataclasses.replace(CLAIM, needs_machine=f"{__name__}:_lacking")
    with pytest.raises(ConfigError, match="cannot be measured here: a cluster is needed"):
        prove.prove(claim, quick=True, results_dir=folder)
    assert dataclasses.replace(CLAIM, needs_machine=f"{__name__}:_lacking_nothing").missing is None


def test_unknown_ids_name_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove.main(["no-such-claim"]) == ConfigError.exit_code
    assert "quickstart" in capsys.readouterr().err


def test_malformed_claims_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text("claims:\n  - id: x\n    statement: y\n")
    with pytest.raises(ConfigError, match="claims.yaml=x"):
        load_claims(path)


@pytest.mark.parametrize(
    ("gpus", "name"), [([], "cpu"), (["NVIDIA H200"], "h200"), (["NVIDIA A100-SXM4-80GB"], "a100"), (["Tesla"], "gpu")]
)
def test_hardware_class(gpus: list[str], name: str) -> None:
    assert hardware_class(gpus) == name


def test_tables_between_markers_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    assert tables.update(path, "new", write=False)
    assert tables.update(path, "new", write=True)
    assert path.read_text() == f"before\n{tables.BEGIN}\nnew\n{tables.END}\nafter\n"
    assert not tables.update(path, "new", write=True)


SUMMARY = {
    "iterations": 60,
    "first_loss": 6.0,
    "final_loss": 3.0,
    "tokens_per_second": 9.0,
    "wall_seconds": 9.0,
    "world_size": 1,
}


def observed(**changes: object) -> Observed:
    facts = {"exit_code": 0, "seconds": 60.0, "summary": SUMMARY, "valid_losses": [4.0, 3.0], "leftover_processes": []}
    return Observed(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exit_code": 7}, "exit code 7"),
        ({"seconds": 300.0}, "the run took 300 s"),
        ({"summary": {**SUMMARY, "final_loss": 5.0}}, "the final loss is 0.83"),
        ({"summary": {**SUMMARY, "final_loss": float("nan")}}, "the final loss is nan"),
        ({"summary": {}}, "summary.json lacks iterations"),
        ({"valid_losses": [3.0, 4.0]}, "validation losses"),
        ({"valid_losses": [3.0]}, "validation losses"),
        ({"leftover_processes": ["12: python"]}, "processes left behind"),
    ],
)
def test_quickstart_is_judged(changes: dict[str, object], problem: str) -> None:
    assert observed().problems(0.75) == []
    assert any(text.startswith(problem) for text in observed(**changes).problems(0.75))

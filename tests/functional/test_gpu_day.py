"""Tests a GPU day without a GPU: every stage runs its code on the CPU, and a broken stage is reported."""

import ast
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.testing.jobs import REPOSITORY as ROOT
from tests.helpers.line_trace.sitecustomize import blocks, does_something
from tools.gpu.stages import CALLS

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(400)]
TRACE = ROOT / "tests" / "helpers" / "line_trace"
MIN_SHARE = 0.85


@dataclass(frozen=True)
class Ran:
    """Results of both calls and of the broken one."""

    out: Path
    output: str
    exit_code: int
    trace: Path

    def stages(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the lines of a call by stage."""
        lines = (self.out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return {entry["stage"]: entry for entry in map(json.loads, lines)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run all calls in one command, so that the packages of the stages are imported once."""
    out = tmp_path_factory.mktemp("day")
    trace = out / "lines.txt"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TRACE), str(ROOT)]),
        "LINE_TRACE": str(trace),
        "LINE_TRACE_FOLDER": str(ROOT.resolve() / "tools" / "gpu"),  # gpu_day.py as well
        "PYTEST_ADDOPTS": "-k no_such_test",  # set in a terminal: stages that run tests must not see it
    }
    environment.pop("MEGATRON_FT_GPU_DAY", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.gpu_day_stages", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    return Ran(out, done.stdout + done.stderr, done.returncode, trace)


def test_every_stage_passes_on_the_cpu(ran: Ran) -> None:
    for call, plan in CALLS.items():
        if call in ("first", "nccl"):
            found = ran.stages(call)
            assert list(found) == [stage.name for stage in plan]
            assert {name: entry["problems"] for name, entry in found.items() if entry["status"] != "passed"} == {}
            assert {entry["device_type"] for entry in found.values()} == {"cpu"}
    assert ran.exit_code == 0, ran.output[-3000:]


def test_figures_are_those_of_real_work(ran: Ran) -> None:
    first, nccl = ran.stages("first"), ran.stages("nccl")
    assert first["recovery"]["figures"]["kills"] == 2
    assert first["recovery"]["figures"]["digests_compared"] > 8
    assert first["dispatch"]["figures"]["counts"]["passed"] > 0
    assert nccl["abort"]["figures"]["stopped"]["survivors"] == 2
    assert nccl["abort"]["figures"]["killed"]["abort_and_form_seconds"] > 0.0
    assert any("sees no GPU" in text for text in first["snapshots"]["not_run"])


def test_a_broken_stage_is_reported_and_stops_no_other(ran: Ran) -> None:
    found = ran.stages("broken/first")
    assert {name: entry["status"] for name, entry in found.items()} == {
        "raises": "failed",
        "reports": "failed",
        "dies": "died",
        "exits": "died",
        "hangs": "timed out",
        "leaves": "failed",
        "skips": "failed",
        "absent": "failed",
    }
    assert found["raises"]["figures"]["found"] == 1
    assert "ValueError: broken on purpose" in found["raises"]["problems"][0]
    assert found["reports"]["figures"]["after"] == 2 and found["dies"]["figures"] == {"before": 3}
    assert "no_such_module" in found["absent"]["problems"][0]
    assert found["skips"]["figures"]["counts"]["passed"] == 0
    assert any("skipped on a GPU day: " in text and "needs a CUDA" in text for text in found["skips"]["problems"])
    for name in ("hangs", "leaves"):
        assert not is_running(found[name]["figures"]["child"])


def is_running(process_id: int) -> bool:
    """Return whether a process has not ended. A zombie counts as ended."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_is_kept(ran: Ran) -> None:
    record = json.loads((ran.out / "broken" / "first.json").read_text())
    assert not record["passed"] and record["counts"] == {"passed": 0, "stages": 8}
    assert json.loads((ran.out / "nccl.json").read_text())["passed"]
    with tarfile.open(ran.out / "broken" / "first-logs.tar.gz") as archive:
        log = archive.extractfile("first/raises.txt")
        assert log is not None and b"broken on purpose" in log.read()
    assert not (ran.out / "results").exists(), "a CPU's results are not a GPU's"
    assert [line.split()[:2] for line in ran.output.splitlines() if line.startswith("timed out")] == [["timed", "out"]]


def test_most_lines_are_executed(ran: Ran) -> None:
    executed = set(ran.trace.read_text(encoding="utf-8").splitlines())
    files = [ROOT / "tools" / "gpu_day.py", *sorted((ROOT / "tools" / "gpu").glob("*.py"))]
    lines = {path: {f"{path.resolve()}:{number}" for number in lines_of(path)} for path in files}
    missed = {path: lines[path] - executed for path in files}
    share = 1.0 - sum(map(len, missed.values())) / sum(map(len, lines.values()))
    print(f"{share:.1%} of the statements are executed")
    numbers = {path.name: sorted(int(line.rpartition(":")[2]) for line in rest) for path, rest in missed.items()}
    assert share >= MIN_SHARE, {name: rest for name, rest in numbers.items() if rest}


def test_what_measures_claims_runs_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "tools/gpu_day.py", "speed", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    lines = (tmp_path / "out" / "speed.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["passed"] * len(CALLS["speed"])


def lines_of(path: Path) -> set[int]:
    """Return the numbers of the lines at which statements begin."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {statement.lineno for block in blocks(tree) for statement in block if does_something(statement)}

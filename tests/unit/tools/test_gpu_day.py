"""Tests the records of a GPU day and the use of its budget, without running a stage."""

import io
import json
import os
import time
import zipfile
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY as ROOT
from tools import gpu_day, gpu_site
from tools.gpu import abort, day, layouts, ranks, results, runner, suites, training
from tools.gpu.day import Day
from tools.gpu.runner import Outcome
from tools.gpu.stages import CALLS
from tools.lock_requirements import Pin, read_pins


def new_day(folder: Path, device_type: str = "cpu") -> Day:
    """Return the context of a stage."""
    return Day(device_type=device_type, folder=folder, shared=folder, deadline=time.monotonic() + 60)


def outcome(stage: str = "a", status: str = "passed", **changes: object) -> Outcome:
    """Return the outcome of a stage."""
    return Outcome(stage=stage, about="answers", status=status, seconds=1.0, **changes)  # type: ignore[arg-type]


def test_every_stage_has_a_function() -> None:
    for plan in CALLS.values():
        for stage in plan:
            module, _, function = stage.entry.partition(":")
            path = ROOT / f"{module.replace('.', '/')}.py"
            assert f"\ndef {function}(day: Day)" in path.read_text(encoding="utf-8"), stage.entry
        assert len({stage.name for stage in plan}) == len(plan)


def test_a_stage_is_not_started_without_time() -> None:
    found = list(runner.run_stages(CALLS["first"], budget_seconds=runner.RESERVE_SECONDS + 1.0))
    assert {each.status for each in found} == {"no time"} and len(found) == len(CALLS["first"])
    assert all(each.failed for each in found)


def test_stages_run_pytest_without_options_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k no_such_test")
    assert list(runner.run_stages([], budget_seconds=runner.RESERVE_SECONDS)) == []
    assert "PYTEST_ADDOPTS" not in os.environ


def test_a_stage_reports_at_once(tmp_path: Path) -> None:
    mine = new_day(tmp_path)
    mine.record(one=1)
    mine.check(True, "holds")
    mine.check(False, "does not hold")
    with mine.part("a part"):
        raise KeyError("missing")
    mine.record(one=2, two=[3])
    figures, problems, not_run = day.read_report(tmp_path)
    assert figures == {"one": 2, "two": [3]}
    assert problems == ["does not hold", "a part: KeyError: 'missing'"] and not_run == []


@pytest.mark.parametrize("is_gpu_day", [False, True])
def test_what_is_not_run_is_a_problem_on_a_gpu_day_only(
    is_gpu_day: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(day.GPU_DAY, str(int(is_gpu_day)))
    new_day(tmp_path).lacks("NCCL", "no GPU")
    _, problems, not_run = day.read_report(tmp_path)
    assert (len(problems), len(not_run)) == ((1, 0) if is_gpu_day else (0, 1))


def test_a_record_has_no_path_of_the_machine() -> None:
    text = "No such file: '/srv/someone/project/x.py', line 3; ratio 1/2, http://a/b and <path>/c"
    cleaned = results.without_paths({"deep": [text, 5]})
    assert "someone" not in cleaned["deep"][0] and "x.py" in cleaned["deep"][0] and cleaned["deep"][1] == 5
    assert "1/2" in cleaned["deep"][0]


def test_a_record_names_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [outcome(), outcome("b", "timed out", problems=["slow"], log="the log")]
    monkeypatch.setattr(results.hardware, "describe", lambda: {"class": "h200"})
    results.keep("first", found, out=tmp_path, results_dir=tmp_path / "results")
    (kept,) = (tmp_path / "results").iterdir()
    record = json.loads(kept.read_text())
    assert kept.name == f"gpu-day-first_h200_{record['date']}.json"
    assert record["passed"] is False and record["figure"] == "1 of 2 stages passed; b timed out"
    assert {"id", "figure", "threshold", "counts", "details", "date", "hardware"} <= record.keys()
    assert "timed out" in results.table(found) and "slow" in results.table(found)


def test_only_known_stages_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_day.main(["first", "--stages", "facts", "nonsense"])
    assert "--stages nonsense" in capsys.readouterr().err


def test_configurations_of_all_variants_are_valid_on_either_device() -> None:
    for overrides, _ in training.VARIANTS.values():
        for device_type in ("cpu", "cuda"):
            ranks.config_for(device_type, {**training.MODEL, **overrides})
    for world_size, parallel in layouts.LAYOUTS.values():
        ranks.config_for("cuda", {**training.MODEL, **parallel}, world_size=world_size)


def test_the_worst_number_decides() -> None:
    expected = {"losses": [1.0, 2.0], "grad_norms": [1.0], "aux_losses": [4.0]}
    assert ranks.difference({**expected, "losses": [1.0, 2.2]}, expected) == pytest.approx(0.1)
    for place in ([float("nan"), 2.0], [1.0, float("nan")]):
        assert ranks.difference({**expected, "losses": place}, expected) == float("inf")


def test_the_rank_that_raised_is_named_and_not_one_that_waits_for_it() -> None:
    with pytest.raises(RuntimeError, match="rank 1: (?s:.*)ValueError: broken on purpose"):
        ranks.run_ranks("tests.helpers.gpu_day_stages:wait_or_raise", world_size=2, arguments={}, seconds=20.0)


def test_ranks_that_are_silent_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"0 did not report in time \(the job has 1 ranks\)"):
        ranks.run_ranks("tests.helpers.gpu_day_stages:wait_or_raise", world_size=1, arguments={}, seconds=0.2)


def test_reads_what_pytest_writes(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    cases = '<testcase name="a"/><testcase name="b"><skipped/></testcase>'
    cases += '<testcase name="c"><failure message="assert 1 == 2&#10;more"/></testcase>'
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert suites.read_junit(path) == ({"passed": 1, "failed": 1, "skipped": 1}, ["c: assert 1 == 2"])


def test_the_site_has_hashes_of_the_lock(tmp_path: Path) -> None:
    pins = read_pins(gpu_site.LOCK.read_text(encoding="utf-8"))
    lines = gpu_site.requirements((*gpu_site.WHEELS, *gpu_site.SOURCES), pins).splitlines()
    assert [line.partition("==")[0] for line in lines] == [*gpu_site.WHEELS, *gpu_site.SOURCES]
    assert all(" --hash=sha256:" in line for line in lines)
    with pytest.raises(ValueError, match="torch"):
        gpu_site.requirements(["torch"], pins)
    with pytest.raises(ValueError, match="one"):
        gpu_site.requirements(["one"], {Pin("one", "1.0"): ()})


def test_unpacking_replaces_what_was_there(tmp_path: Path) -> None:
    wheel, site = tmp_path / "one-1.0.whl", tmp_path / "site"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("one/__init__.py", "version = 1\n")
    wheel.write_bytes(content.getvalue())
    (site / "old").mkdir(parents=True)
    assert gpu_site.unpack([wheel], site) == 1
    assert sorted(path.name for path in site.iterdir()) == ["one"]


def test_survivors_have_the_variables_of_a_job_that_loses_nodes() -> None:
    assert abort.surviving()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"

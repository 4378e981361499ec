"""The record of ``make test-all`` and the reports that it reads."""

from pathlib import Path

import pytest

from benchmarks.suite_minutes import STEPS, minutes

REPORT = """<testsuites><testsuite name="pytest" time="{time}">
<testcase classname="tests.unit.test_a" name="one" time="1.5"/>
<testcase classname="tests.unit.config.test_b" name="two" time="2.5">{child}</testcase>
<testcase classname="benchmarks.tests.test_c" name="four" time="0.5"/>
<testcase classname="benchmarks.tests.test_claims_quick" name="three" time="4"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def write(folder: Path, child: str = "") -> None:
    for number, name in enumerate(STEPS):
        report = REPORT.format(time=60 * (number + 1), child=child if name == "extended" else "")
        (folder / f"{name}.xml").write_text(report, encoding="utf-8")


def test_it_counts_tests_and_seconds_by_step_and_part(tmp_path: Path) -> None:
    write(tmp_path)
    result = minutes(tmp_path)
    assert result["passed"]
    assert result["figure"] == "9 passed, 0 failed, 3 skipped; test 1.0 min, extended 2.0 min, timed 3.0 min"
    assert result["steps"]["test"]["parts"] == {
        "benchmarks": {"tests": 1, "worker_seconds": 0.5},
        "quick claims": {"tests": 1, "worker_seconds": 4.0},
        "unit": {"tests": 2, "worker_seconds": 4.0},
    }


@pytest.mark.parametrize("kind", ["failure", "error"])
def test_a_failed_test_is_named_and_fails_the_record(kind: str, tmp_path: Path) -> None:
    write(tmp_path, f'<{kind} message="no"/>')
    result = minutes(tmp_path)
    assert not result["passed"]
    assert result["steps"]["extended"]["failures"] == ["tests.unit.config.test_b::two"]


def test_a_run_that_was_cut_leaves_no_record(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "timed.xml").unlink()
    with pytest.raises(FileNotFoundError):
        minutes(tmp_path)

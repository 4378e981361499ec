"""The claim would notice a configuration that is let pass; its quick variant runs with all claims'."""

from pathlib import Path

import pytest

from benchmarks import bad_config
from benchmarks.bad_inputs import LAYOUT, SYNTAX, VALUES, bad, file_cases, good_source
from benchmarks.bad_placements import PLACEMENT, placement_file_cases


def test_a_sound_configuration_is_noticed(tmp_path: Path) -> None:
    case = bad(f"data.train=[{good_source(tmp_path)}]", says=["must"])
    problems = bad_config.in_process(case).problems(case)
    assert any("ranks were started" in problem for problem in problems)
    assert any("exit code 0" in problem for problem in problems)


def test_a_message_without_its_constraint_is_noticed() -> None:
    case = bad("model.num_layers=0", says=["model.num_layers=0", "must be prime"])
    assert any("must be prime" in problem for problem in bad_config.in_process(case).problems(case))


def test_a_process_that_imports_torch_is_noticed() -> None:
    observed = bad_config.Observed(exit_code=2, stdout="", stderr="error: x", started=False, heavy=("torch",))
    assert observed.problems(bad(says=["x"])) == [": imported torch"]


def test_cases_are_distinct_and_name_key_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases = [*SYNTAX, *LAYOUT, *VALUES, *PLACEMENT, *file_cases(tmp_path), *placement_file_cases(tmp_path)]
    assert len({(case.overrides, *case.environment.values()) for case in cases}) == len(cases)
    assert all(len(case.says) >= 2 for case in cases)

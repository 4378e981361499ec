"""Tests the faults put into source: every kind is found, and each changes one place. Also tests how the tests of a
faulty file are judged."""

import random
from pathlib import Path

import pytest

from benchmarks.mutants import choose, mutants
from benchmarks.seeded_faults import SUBSYSTEMS, fault_of, files_of, selections, try_fault
from benchmarks.source import ROOT

SOURCE = '''"""Module."""

LIMIT = 1 + 1


def decide(count, names, *, strict=True):
    """Docstring."""
    if count == LIMIT and names:
        names.clear()
    found = True
    if strict:
        raise ValueError(f"{count + 1} of {LIMIT}")
    return count - 1 if "é" in names else found
'''


def test_every_kind_of_fault_is_found_once_and_nothing_outside_functions() -> None:
    found = {(mutant.line, mutant.before, mutant.after) for mutant in mutants(SOURCE)}
    assert found == {
        (8, "count == LIMIT and names", "(not (count == LIMIT and names))"),
        (8, "count == LIMIT and names", "(count == LIMIT or names)"),
        (8, "count == LIMIT", "(count != LIMIT)"),
        (9, "names.clear()", "pass"),
        (10, "True", "(False)"),
        (11, "strict", "(not strict)"),
        (13, '"é" in names', "(not 'é' in names)"),
        (13, '"é" in names', "('é' not in names)"),
        (13, "count - 1", "(count + 1)"),
    }


def test_a_fault_changes_one_place_of_the_source() -> None:
    for mutant in mutants(SOURCE):
        old, new = SOURCE.splitlines(), mutant.source.splitlines()
        changed = [number for number, (left, right) in enumerate(zip(old, new, strict=True), 1) if left != right]
        assert changed == [mutant.line]
        assert new[mutant.line - 1].count(mutant.after) == 1
        compile(mutant.source, "mutant", "exec")


def test_a_file_without_functions_has_no_fault() -> None:
    assert choose("LIMIT = 1 + 1\n", random.Random(0)) is None


def test_each_pattern_of_a_subsystem_names_files() -> None:
    for patterns in SUBSYSTEMS.values():
        for pattern in patterns:
            assert list((ROOT / "megatron_ft").glob(pattern)), f"{pattern} names no file"


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("configuration", "replay") else pytest.param(name, marks=pytest.mark.extended)
        for name in SUBSYSTEMS
    ],
)
def test_each_subsystem_has_a_fault_that_its_seed_repeats(name: str) -> None:
    path, mutant = fault_of(name, 1)
    assert (path, mutant) == fault_of(name, 1)
    assert mutant.source != (ROOT / path).read_text(encoding="utf-8")
    compile(mutant.source, str(path), "exec")


def test_a_pattern_names_files_and_not_those_of_folders_below() -> None:
    """A subsystem whose files have moved into a folder must name that folder, as ``sinks`` does."""
    found = {path.relative_to(ROOT / "megatron_ft" / "telemetry") for path in files_of("sinks and figures")}
    assert {Path("sink_set.py"), Path("goodput.py"), Path("sinks/jsonl.py"), Path("sinks/wandb.py")} <= found
    assert not any(path.parts[0] == "report" for path in found), "the page is a subsystem of its own"


def test_the_tests_of_a_file_come_before_those_of_its_folder_and_all_others() -> None:
    order = list(selections(ROOT, Path("megatron_ft/planning/iteration.py")))
    assert order == [
        ("tests/unit/planning/test_iteration.py",),
        ("tests/unit/planning",),
        ("tests/contract", "tests/unit"),
        ("tests/distributed", "tests/slurm"),
        ("tests/functional", "benchmarks/tests"),
    ]
    assert list(selections(ROOT, Path("megatron_ft/mcore/training/engine.py")))[-3] == (
        "tests/distributed",
        "tests/slurm",
    )


@pytest.mark.parametrize(
    ("test", "caught_by"),
    [
        ("assert half(4) == 2", "tests/unit/planning/test_sums.py::test_half"),
        ("assert half(0) == 0", "nothing"),
        ("assert False", "nothing"),
    ],
    ids=["caught", "survived", "fails without the fault, too"],
)
def test_a_fault_is_caught_by_a_test_that_passes_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, caught_by: str
) -> None:
    own = "tests/unit/planning/test_sums.py"
    monkeypatch.setattr("benchmarks.seeded_faults.selections", lambda *_: [(own,)])
    module, tests = tmp_path / "megatron_ft/planning/sums.py", tmp_path / own
    for file, content in (
        (module, "def half(number):\n    return number - number // 2\n"),
        (tests, f"from megatron_ft.planning.sums import half\n\n\ndef test_half():\n    {test}\n"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (fault,) = (mutant for mutant in mutants(module.read_text()) if mutant.after == "(number + number // 2)")
    outcome = try_fault(tmp_path, module.relative_to(tmp_path), fault)
    assert outcome.details["caught_by"] == caught_by and outcome.passed == (caught_by != "nothing")
    assert module.read_text().endswith("// 2\n"), "the fault is taken out again"

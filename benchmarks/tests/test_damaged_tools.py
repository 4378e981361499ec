"""Tests that every tool refuses damaged, hostile, truncated and foreign inputs, with one clear error.

Each command gets a share of the inputs, so
that all commands of a kind together get all of them.
"""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import damaged_tools
from benchmarks.damaged_inputs import Damage
from benchmarks.damaged_tools import COMMANDS, Command, Outcomes, Workplace, damages
from megatron_ft.testing import engines

STRIDE = 7
MOST_SHARE = {"dense": 0.3, "megatron": 0.4}
"""Largest share of inputs whose damage a command does not read; 0 for the other kinds."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    engines.install()
    return Workplace(tmp_path_factory.mktemp("damaged"))


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as ``tools/generate.py`` sets it


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.kind}: {command.name}")
def test_damaged_inputs_are_refused(command: Command, workplace: Workplace) -> None:
    outcomes = Outcomes()
    workplace.run(command, None, outcomes)
    number = [other for other in COMMANDS if other.kind == command.kind].index(command)
    chosen = damages(command.kind)[number % STRIDE :: STRIDE]
    for damage in chosen:
        workplace.run(command, damage, outcomes)
    assert outcomes.problems == []
    assert outcomes.refused + outcomes.unaffected == len(chosen) >= 20
    assert outcomes.unaffected <= MOST_SHARE.get(command.kind, 0.0) * len(chosen)


def test_all_inputs_are_distinct_and_all_are_shared_out() -> None:
    counts = Counter(command.kind for command in COMMANDS)
    for kind, least in {"dense": 300, "window": 450, "folder": 200, "megatron": 180}.items():
        names = [damage.name for damage in damages(kind)]
        assert len(set(names)) == len(names) >= least
        assert counts[kind] >= STRIDE, "some inputs are given to no command"


def test_every_command_of_the_tools_is_in_the_table() -> None:
    found = {command.name.partition(",")[0] for command in COMMANDS}
    for name in ("to-hf", "from-hf", "weights", "average", "upcycle", "to-megatron", "from-window"):
        assert name in found
    assert {"list", "verify", "diff", "strategies", "generate", "load_weights"} <= found


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((0, "", ""), "ended with 0"),
        ((-1, "", "Traceback"), "ended with -1"),
        ((5, "", "something is wrong\n"), "does not name the input"),
        ((5, "", "{path}: a\n{path}: b\n"), "printed 2 lines"),
        ((5, "", "{path}: \x1b[2J\n"), "printed control characters"),
        ((5, "", "{path}: is damaged\n"), ""),
    ],
)
def test_outcomes(
    answer: tuple[int, str, str],
    problem: str,
    workplace: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    code, printed, error = answer
    command, outcomes = next(each for each in COMMANDS if each.name == "verify" and each.kind == "folder"), Outcomes()
    damage = Damage(name="none", apply=lambda folder: tmp_path)
    monkeypatch.setattr(damaged_tools, "_call", lambda *words: (code, printed, error.replace("{path}", str(tmp_path))))
    workplace.run(command, damage, outcomes)
    assert bool(outcomes.problems) == bool(problem) and problem in "".join(outcomes.problems)
    assert outcomes.refused == int(not problem)

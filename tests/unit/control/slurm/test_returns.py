"""Tests that the launcher of an array may return after the death of its node as long as the run makes progress."""

import json
from pathlib import Path

import pytest

from megatron_ft.control.slurm.attempts import RunAttempts
from megatron_ft.control.slurm.returns import main
from megatron_ft.errors import EXIT_OK, ControlError
from megatron_ft.planning.recovery.job_attempts import Attempt, AttemptPolicy, Next

OPTIONS = ["--array=17", "--max-fruitless=3"]


def report(run_dir: Path, iteration: int) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "metrics", "iteration": iteration}) + "\n")


def test_it_ends_after_so_many_that_got_no_further(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, 5)
    assert [main([str(tmp_path), *OPTIONS]) for _ in range(3)] == [EXIT_OK] * 3
    report(tmp_path, 6)
    assert [main([str(tmp_path), *OPTIONS]) for _ in range(3)] == [EXIT_OK] * 3, "progress resets the count"
    assert RunAttempts(tmp_path).read_end("17") is None and capsys.readouterr().err == ""
    assert main([str(tmp_path), *OPTIONS]) == ControlError.exit_code
    assert RunAttempts(tmp_path).read_end("17") == ControlError.exit_code
    reason = "consecutive attempts without progress beyond iteration 6: 3"
    assert capsys.readouterr().err == f"array 17 ends: {reason}\n"
    assert json.loads((tmp_path / "slurm" / "17.json").read_text())["reason"] == reason


def test_the_chains_next_array_counts_from_zero(tmp_path: Path) -> None:
    assert [main([str(tmp_path), *OPTIONS]) for _ in range(3)][-1] == ControlError.exit_code
    assert main([str(tmp_path), "--array=18", "--max-fruitless=3"]) == EXIT_OK
    assert RunAttempts(tmp_path).read_end("18") is None


def test_it_counts_where_an_allocation_continues_the_run(tmp_path: Path) -> None:
    main([str(tmp_path), *OPTIONS])
    (gone,) = RunAttempts(tmp_path).read()
    assert (gone.exit_code, gone.asked, gone.iteration) == (None, None, 0)
    own = Attempt(job_id="19", hosts=("a",), exit_code=7, asked=None, iteration=0)
    assert AttemptPolicy(num_nodes=1, max_fruitless=3).decide([gone, own], ["a"]).next is Next.AGAIN
    assert AttemptPolicy(num_nodes=1, max_fruitless=2).decide([gone, own], ["a"]).is_final


def test_a_run_that_came_to_nothing_has_nothing_to_count(tmp_path: Path) -> None:
    assert main([str(tmp_path / "first"), *OPTIONS]) == EXIT_OK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["slurm/attempts.jsonl", "metrics.jsonl"])
def test_damage_is_no_reason_to_start(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path), *OPTIONS])
    path = tmp_path / file
    path.write_text("{}\n")
    assert main([str(tmp_path), *OPTIONS]) == ControlError.exit_code
    assert capsys.readouterr().err.startswith(f"array 17: {path}: damaged: ")
    assert path.read_text() == "{}\n" and RunAttempts(tmp_path).read_end("17") is None

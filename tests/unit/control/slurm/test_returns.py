"""An array's console that comes back after the death of its node: as long as the run gets on."""

import json
from pathlib import Path

import pytest

from megatron_ft.control.slurm.attempts import read_attempts, read_end
from megatron_ft.control.slurm.returns import main
from megatron_ft.errors import EXIT_OK, ControlError
from megatron_ft.planning.recovery.job_attempts import AttemptPolicy, Next, decide

OPTIONS = ["--array=17", "--max-fruitless=3"]


def report(run_dir: Path, iteration: int) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "metrics", "iteration": iteration}) + "\n")


def test_it_ends_after_so_many_that_got_no_further(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, 5)
    assert [main([str(tmp_path), *OPTIONS]) for _ in range(3)] == [EXIT_OK] * 3
    report(tmp_path, 6)
    assert [main([str(tmp_path), *OPTIONS]) for _ in range(3)] == [EXIT_OK] * 3, "progress counts anew"
    assert read_end(tmp_path, "17") is None and capsys.readouterr().err == ""
    assert main([str(tmp_path), *OPTIONS]) == ControlError.exit_code
    assert read_end(tmp_path, "17") == ControlError.exit_code
    reason = "3 attempts in a row made no progress: none came beyond iteration 6"
    assert capsys.readouterr().err == f"array 17 ends: {reason}\n"
    assert json.loads((tmp_path / "slurm" / "17.json").read_text())["reason"] == reason


def test_the_chains_next_array_counts_anew(tmp_path: Path) -> None:
    assert [main([str(tmp_path), *OPTIONS]) for _ in range(3)][-1] == ControlError.exit_code
    assert main([str(tmp_path), "--array=18", "--max-fruitless=3"]) == EXIT_OK
    assert read_end(tmp_path, "18") is None


def test_what_nobody_has_seen_end_is_no_end_by_itself(tmp_path: Path) -> None:
    """An allocation may continue the run of an array."""
    main([str(tmp_path), *OPTIONS])
    (attempt,) = read_attempts(tmp_path)
    assert (attempt.exit_code, attempt.asked, attempt.iteration) == (None, None, 0)
    verdict = decide([attempt], AttemptPolicy(num_nodes=1), ["a"])
    assert (verdict.next, verdict.reason) == (Next.AGAIN, "its node died; 1 nodes are left, 1 needed")


def test_a_run_that_came_to_nothing_has_nothing_to_count(tmp_path: Path) -> None:
    assert main([str(tmp_path / "first"), *OPTIONS]) == EXIT_OK
    assert list(tmp_path.iterdir()) == []


def test_damage_is_no_reason_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path), *OPTIONS])
    path = tmp_path / "slurm" / "attempts.jsonl"
    path.write_text("{}\n")
    assert main([str(tmp_path), *OPTIONS]) == ControlError.exit_code
    assert capsys.readouterr().err.startswith(f"array 17: {path}: damaged: ")
    assert path.read_text() == "{}\n" and read_end(tmp_path, "17") is None

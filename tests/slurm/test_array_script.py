"""Tests ``slurm/pretrain_array.sbatch`` when Slurm's commands fail. A script replaces these commands, so no cluster is
needed."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from megatron_ft.errors import FINAL_EXIT_CODES, ConfigError, ControlError
from megatron_ft.testing.jobs import REPOSITORY
from megatron_ft.testing.slurm_cluster import wait_until
from tests.helpers.programs import write_program

PROGRAMS = {
    "squeue": """\
case $* in
  *State*) # the state of task 0 and how often it was requeued; nothing where it waits for no slot
    echo >> "$FOLDER/states"
    [ "$(wc -l < "$FOLDER/states")" -gt "${FAILURES:-0}" ] || { echo "no answer" >&2; exit 1; }
    echo "${STATE:-}" ;;
  *--name=lm*) echo "18 singleton(unfulfilled)" ;;
  *) echo >> "$FOLDER/asked"; [ "$(wc -l < "$FOLDER/asked")" -gt 1 ] || exit 1; printf '%s\\n' 0 1 2 ;;
esac
""",
    "scontrol": 'echo "$*" >> "$FOLDER/requeued"\n',
    "sleep": 'echo "$*" >> "$FOLDER/slept"\n',
    "scancel": 'echo "$*" >> "$FOLDER/cancelled"; exit 1\n',
    "python": """\
case $* in
  *node.join*) touch "$FOLDER/joined"; until [ -e "$FOLDER/over" ]; do read -rt 0.05 <> <(:) || true; done; exit 0 ;;
  *control.slurm.returns*) echo "$*" > "$FOLDER/counted"
    [ -z "${ENDS:-}" ] || { mkdir -p "$3/slurm"; echo '{"is_final": true}' > "$3/slurm/17.json"; }
    exit "${RETURNS:-0}" ;;
  *control.slurm.drains*) # what it waits with ends by itself: nobody is left behind
    echo $$ > "$FOLDER/watcher.new"; mv "$FOLDER/watcher.new" "$FOLDER/watcher"; exec "$SLEEP" 60 ;;
  *) until [ -e "$FOLDER/watcher" ]; do read -rt 0.05 <> <(:) || true; done
    marker=$FOLDER/runs/first/slurm/17.json
    [ -z "${FINAL:-}" ] || { mkdir -p "${marker%/*}"; echo "{'is_final': $FINAL}" | tr "'" '"' > "$marker"; }
    exit "${ENDS_WITH:-7}" ;;
esac
""",
}


def start(folder: Path, *, task: int, **variables: str) -> "subprocess.Popen[bytes]":
    """Start a task of an array of three tasks.

    Args:
        variables: ``FAILURES`` and ``STATE`` of what ``squeue`` says of task 0.
    """
    for name, body in PROGRAMS.items():
        write_program(folder, name, body)
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "MFT_"))}
    environment |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FOLDER": str(folder),
        "SLEEP": shutil.which("sleep"),
        "MFT_HOME": str(REPOSITORY),
    }
    environment |= {"MFT_PYTHON": str(folder / "python"), "MFT_INTERFACE": "eth0", "MFT_RUNS": str(folder / "runs")}
    environment |= {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "3"}
    environment |= {"SLURM_JOB_NAME": "lm", **variables}
    command = ["bash", str(REPOSITORY / "slurm" / "pretrain_array.sbatch"), "run.name=first"]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, env=environment, start_new_session=True, stderr=output)


def test_a_chain_ends_after_what_would_come_again() -> None:
    codes = "".join(map(str, sorted(FINAL_EXIT_CODES)))
    assert f"$code == [{codes}]" in (REPOSITORY / "slurm" / "pretrain_array.sbatch").read_text()


@pytest.mark.timeout(60)
def test_the_rest_is_cancelled_when_slurm_answers_again(tmp_path: Path) -> None:
    process = start(tmp_path, task=0)
    wait_until("a node waits for the console", (tmp_path / "joined").exists)
    assert process.wait(timeout=30) == 7
    (tmp_path / "over").touch()  # Slurm would have ended it
    watcher = int((tmp_path / "watcher").read_text())
    wait_until("the watcher of drained nodes has ended", lambda: not psutil.pid_exists(watcher))
    assert (tmp_path / "cancelled").read_text().splitlines()[-2:] == ["--quiet 17_1", "--quiet 17_2"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["MFT_DRAIN_POLL_SECONDS", "MFT_MAX_FRUITLESS"])
@pytest.mark.parametrize("number", ["0", "abc", "1.5", "99999999"])
def test_a_number_that_is_none_is_refused_before_anything_starts(tmp_path: Path, name: str, number: str) -> None:
    process = start(tmp_path, task=0, **{name: number})
    assert process.wait(timeout=30) == ConfigError.exit_code
    assert f"{name}={number}: must be a whole number" in (tmp_path / "output").read_text()
    assert not (tmp_path / "joined").exists() and not (tmp_path / "watcher").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ends", ["1", ""])
def test_a_console_that_may_not_come_back_ends_the_array(tmp_path: Path, ends: str) -> None:
    """The chain ends too if the run makes no progress, but not if the progress cannot be determined."""
    returned = {
        "SLURM_RESTART_COUNT": "3",
        "SLURM_JOB_DEPENDENCY": "singleton(fulfilled)",
        "RETURNS": "8",
        "ENDS": ends,
    }
    process = start(tmp_path, task=0, MFT_MAX_FRUITLESS="4", **returned)
    assert process.wait(timeout=30) == ControlError.exit_code
    options = f"{tmp_path}/runs/first --array 17 --max-fruitless 4"
    assert (tmp_path / "counted").read_text() == f"-m megatron_ft.control.slurm.returns {options}\n"
    assert not (tmp_path / "joined").exists() and not (tmp_path / "watcher").exists()
    cancelled = (tmp_path / "cancelled").read_text().splitlines()
    assert {"--quiet 17_1", "--quiet 17_2"} <= set(cancelled)
    assert ("--quiet 18" in cancelled) == bool(ends)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("final", "code"), [("true", 93), ("false", 8)])
def test_an_array_that_comes_back_when_it_was_over_ends_as_before(tmp_path: Path, final: str, code: int) -> None:
    """Its node died after the decision and before everything was cancelled."""
    marker = tmp_path / "runs" / "first" / "slurm" / "17.json"
    marker.parent.mkdir(parents=True)
    marker.write_text(f'{{"job_id": "17", "exit_code": 8, "reason": "because", "is_final": {final}}}\n')
    returned = {"SLURM_RESTART_COUNT": "4", "SLURM_JOB_DEPENDENCY": "singleton(fulfilled)", "MFT_FINAL_EXIT_CODE": "93"}
    assert start(tmp_path, task=0, **returned).wait(timeout=30) == code
    assert ("--quiet 18" in (tmp_path / "cancelled").read_text().splitlines()) == (final == "true")
    assert not (tmp_path / "counted").exists() and not (tmp_path / "joined").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("ends_with", "code"), [(0, 0), (2, 93), (6, 93), (7, 7), (130, 130)])
def test_tools_of_a_site_see_that_somebody_has_to_look(tmp_path: Path, ends_with: int, code: int) -> None:
    process = start(tmp_path, task=0, MFT_FINAL_EXIT_CODE="93", ENDS_WITH=str(ends_with))
    wait_until("a node waits for the console", (tmp_path / "joined").exists)
    assert process.wait(timeout=30) == code
    (tmp_path / "over").touch()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("final", ["true", "false"])
def test_a_planned_end_ends_the_chain_only_if_the_run_is_complete(tmp_path: Path, final: str) -> None:
    chained = {"SLURM_JOB_DEPENDENCY": "singleton(fulfilled)"}
    process = start(tmp_path, task=0, ENDS_WITH="0", FINAL=final, **chained)
    assert process.wait(timeout=30) == 0
    (tmp_path / "over").touch()
    assert ("--quiet 18" in (tmp_path / "cancelled").read_text().splitlines()) == (final == "true")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", ["0", "256", "-1", "x"])
@pytest.mark.parametrize("others", [{}, {"MFT_INTERFACE": ""}, {"MFT_MAX_FRUITLESS": "x"}])
def test_an_exit_code_that_is_none_is_refused(tmp_path: Path, code: str, others: dict[str, str]) -> None:
    """This includes an exit code with which a refusal ends."""
    process = start(tmp_path, task=0, MFT_FINAL_EXIT_CODE=code, **others)
    assert process.wait(timeout=30) == ConfigError.exit_code
    refused = f"MFT_FINAL_EXIT_CODE={code}: must be a whole number from 1 to 255"
    assert others or refused in (tmp_path / "output").read_text()
    assert not (tmp_path / "joined").exists()


@pytest.mark.timeout(60)
def test_a_console_that_may_come_back_does(tmp_path: Path) -> None:
    process = start(tmp_path, task=0, SLURM_RESTART_COUNT="1")
    wait_until("a node waits for the console", (tmp_path / "joined").exists)
    assert process.wait(timeout=30) == 7
    (tmp_path / "over").touch()
    assert (tmp_path / "counted").exists()


@pytest.mark.timeout(60)
def test_a_node_whose_time_limit_cannot_be_reported_stays(tmp_path: Path) -> None:
    process = start(tmp_path, task=1)
    wait_until("it waits for a console", (tmp_path / "joined").exists)
    process.send_signal(signal.SIGUSR1)
    reported = tmp_path / "cancelled"
    wait_until("task 0 gets the signal", lambda: reported.exists() and "--signal=USR1 17_0" in reported.read_text())
    (tmp_path / "over").touch()
    assert process.wait(timeout=30) == 0


@pytest.mark.timeout(60)
def test_a_spare_in_the_slot_of_task_0_goes_back_when_slurm_answers_again(tmp_path: Path) -> None:
    process = start(tmp_path, task=1, FAILURES="3", STATE="PENDING   1")
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 17_1\n"
    assert (tmp_path / "slept").read_text() == "5\n" * 3
    assert (tmp_path / "output").read_text().count("squeue is called again: no answer") == 1, "one line, not three"
    assert not (tmp_path / "joined").exists()


@pytest.mark.timeout(60)
def test_a_node_joins_when_slurm_answers_again(tmp_path: Path) -> None:
    process = start(tmp_path, task=1, FAILURES="3", STATE="RUNNING   1")
    wait_until("it waits for a console", (tmp_path / "joined").exists)
    (tmp_path / "over").touch()
    assert process.wait(timeout=30) == 0
    assert not (tmp_path / "requeued").exists()


@pytest.mark.timeout(60)
def test_a_node_without_an_answer_frees_a_slot_that_may_be_that_of_task_0(tmp_path: Path) -> None:
    process = start(tmp_path, task=1, FAILURES="1000")
    assert process.wait(timeout=30) == ControlError.exit_code
    output = (tmp_path / "output").read_text()
    assert output.count("no answer") == 2
    assert "task 1 ends, because task 0 may need its slot: squeue failed 60 times, 5 s apart: no answer" in output
    assert len((tmp_path / "states").read_text().splitlines()) == 60
    assert not (tmp_path / "joined").exists() and not (tmp_path / "requeued").exists()

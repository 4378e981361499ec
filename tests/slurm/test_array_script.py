"""``slurm/pretrain_array.sbatch`` where Slurm's commands fail: they follow a script, no cluster is needed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from megatron_ft.errors import EXIT_OK, FINAL_EXIT_CODES
from tests.helpers.jobs import REPOSITORY
from tests.helpers.programs import write_program
from tests.helpers.slurm_cluster import wait_until

PROGRAMS = {
    "squeue": """\
case $* in
  *State*) ;;  # task 0 waits for no slot
  *) echo >> "$FOLDER/asked"; [ "$(wc -l < "$FOLDER/asked")" -gt 1 ] || exit 1; printf '%s\\n' 0 1 2 ;;
esac
""",
    "scancel": 'echo "$*" >> "$FOLDER/cancelled"; exit 1\n',
    "python": """\
case $* in
  *join_main*) touch "$FOLDER/joined"; until [ -e "$FOLDER/over" ]; do read -rt 0.05 <> <(:) || true; done; exit 0 ;;
  *) exit 7 ;;
esac
""",
}


def start(folder: Path, *, task: int) -> "subprocess.Popen[bytes]":
    """A task of an array of three."""
    for name, body in PROGRAMS.items():
        write_program(folder, name, body)
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "MFT_"))}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "FOLDER": str(folder), "MFT_HOME": str(REPOSITORY)}
    environment |= {"MFT_PYTHON": str(folder / "python"), "MFT_INTERFACE": "eth0", "MFT_RUNS": str(folder / "runs")}
    environment |= {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "3"}
    environment["SLURM_JOB_NAME"] = "lm"
    command = ["bash", str(REPOSITORY / "slurm" / "pretrain_array.sbatch"), "run.name=first"]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def test_a_chain_ends_after_what_would_come_again_and_after_a_run_that_is_done() -> None:
    codes = "".join(map(str, sorted({EXIT_OK, *FINAL_EXIT_CODES})))
    assert f"$code == [{codes}]" in (REPOSITORY / "slurm" / "pretrain_array.sbatch").read_text()


@pytest.mark.timeout(60)
def test_the_rest_is_cancelled_when_slurm_answers_again(tmp_path: Path) -> None:
    process = start(tmp_path, task=0)
    wait_until("a node waits for the console", (tmp_path / "joined").exists)
    assert process.wait(timeout=30) == 7
    (tmp_path / "over").touch()  # Slurm would have ended it
    assert (tmp_path / "cancelled").read_text().splitlines()[-2:] == ["--quiet 17_1", "--quiet 17_2"]


@pytest.mark.timeout(60)
def test_a_node_whose_time_limit_nobody_can_be_told_of_stays(tmp_path: Path) -> None:
    process = start(tmp_path, task=1)
    wait_until("it waits for a console", (tmp_path / "joined").exists)
    process.send_signal(signal.SIGUSR1)
    told = tmp_path / "cancelled"
    wait_until("task 0 is told", lambda: told.exists() and "--signal=USR1 17_0" in told.read_text())
    (tmp_path / "over").touch()
    assert process.wait(timeout=30) == 0

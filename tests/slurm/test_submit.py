"""Tests ``slurm/submit.py`` with a script in place of ``sbatch``, so no cluster is needed."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY
from tests.helpers.programs import write_program

SBATCH = """\
number=$(ls "$JOBS" | wc -l)
[ "$number" -lt "$MOST_JOBS" ] || { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
cat > "$JOBS/$number"
echo "$((17 + number))"
"""


def submit(
    folder: Path, *words: str, most_jobs: int = 9, has_slurm: bool = True, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Submit jobs of four nodes. The dry run is replaced."""
    (folder / "jobs").mkdir()
    path = f"{folder}:{os.environ['PATH']}"
    if has_slurm:
        write_program(folder, "sbatch", SBATCH)
    else:  # this machine may have Slurm's commands
        path = str(folder)
        for program in ("bash", "true", "false"):
            (folder / program).symlink_to(str(shutil.which(program)))
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MFT_")}
    environment |= {"PATH": path, "JOBS": str(folder / "jobs"), "MOST_JOBS": str(most_jobs)}
    environment |= {"MFT_INTERFACE": "eth0", "MFT_PYTHON": "true", "MFT_RUNS": str(folder / "runs"), **variables}
    command = [sys.executable, "slurm/submit.py", "--nodes=4", *words, "run.name=first"]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=False)


@pytest.mark.parametrize("is_option", [True, False])
def test_a_job_reads_the_site_that_it_was_checked_with(tmp_path: Path, is_option: bool) -> None:
    site = tmp_path / "our site.env"
    site.write_text(f"{(REPOSITORY / 'slurm' / 'site.env').read_text()}\nMFT_SPARE_NODES=2\n")
    words, variables = ([f"--site={site}"], {}) if is_option else ([], {"MFT_SITE": str(site)})
    done = submit(tmp_path, "--shape=array", "--queued=2", *words, **variables)
    assert done.returncode == 0, done.stderr
    (job,) = (tmp_path / "jobs").iterdir()
    assert f"export MFT_SITE='{site}'\n" in job.read_text()


def test_it_says_where_a_run_is_that_has_a_folder_of_its_own(tmp_path: Path) -> None:
    done = submit(tmp_path, f"run.dir={tmp_path / 'elsewhere'}")
    assert done.returncode == 0, done.stderr
    assert f"run       {tmp_path / 'elsewhere' / 'first'}" in done.stdout
    (job,) = (tmp_path / "jobs").iterdir()
    assert f"--output={tmp_path / 'elsewhere'}/slurm-%j.log" in job.read_text()


@pytest.mark.parametrize(
    ("most_jobs", "output"), [(2, "\nof 3 jobs, these were submitted and remain in the queue: 17, 18\n"), (0, "\n")]
)
def test_jobs_of_a_chain_that_stay_when_another_is_refused_are_named(
    tmp_path: Path, most_jobs: int, output: str
) -> None:
    done = submit(tmp_path, "--chain=3", most_jobs=most_jobs)
    assert done.returncode == 2
    assert done.stderr == f"sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit{output}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--queued=1"], "--queued: can only be used with --shape array"),
        (["--shape=array", "--queued=2"], r"--queued=2: must be in 0\.\.1 \(MFT_SPARE_NODES\)"),
        (["--shape=array", "--chain=0"], "--chain=0: must be at least 1"),
    ],
)
def test_what_a_shape_cannot_have_is_refused(tmp_path: Path, words: Sequence[str], message: str) -> None:
    done = submit(tmp_path, *words, MFT_SPARE_NODES="1")
    assert done.returncode == 2
    assert re.match(message, done.stderr), done.stderr


def test_a_count_that_is_none_is_refused(tmp_path: Path) -> None:
    done = submit(tmp_path, MFT_SPARE_NODES="one")
    assert (done.returncode, done.stderr.partition(",")[0]) == (2, "MFT_SPARE_NODES=one: must be a whole number")
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_check_submits_and_writes_nothing_and_prints_the_command(tmp_path: Path) -> None:
    done = submit(tmp_path, "--check", "data.train=[a b]", has_slurm=False)
    assert done.returncode == 0, done.stderr
    script, log = REPOSITORY / "slurm" / "pretrain.sbatch", f"{tmp_path / 'runs'}/slurm-%j.log"
    words = f"sbatch --nodes=4 --output={log} {script} 'data.train=[a b]' run.name=first"
    assert f"MFT_SITE={REPOSITORY / 'slurm' / 'site.env'} {words}\n" in done.stdout
    assert list((tmp_path / "jobs").iterdir()) == [] and not (tmp_path / "runs").exists()


def test_a_check_names_what_is_refused(tmp_path: Path) -> None:
    done = submit(tmp_path, "--check", MFT_PYTHON="false")
    assert (done.returncode, done.stderr) == (2, "the dry run refuses this job, so it was not submitted\n")


def test_a_machine_without_slurm_is_named_before_the_dry_run(tmp_path: Path) -> None:
    done = submit(tmp_path, has_slurm=False, MFT_PYTHON="false")
    assert done.returncode == 2 and done.stderr.startswith("sbatch: must be installed")

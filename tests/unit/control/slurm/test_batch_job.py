"""Tests the process behind a batch script. Launchers and Slurm are scripted; ``tests/slurm`` has real ones."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.config.job import RunConfig
from megatron_ft.control.rundir import RunDir
from megatron_ft.control.slurm.batch_job import _Site
from megatron_ft.errors import ConfigError
from megatron_ft.planning.recovery.job_attempts import Next
from megatron_ft.testing.jobs import REPOSITORY
from megatron_ft.testing.slurm_cluster import wait_until
from tests.helpers.programs import write_program

ALLOCATION = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[0-3]", "SLURM_JOB_NAME": "lm", "SLURM_NTASKS": "4"}
CONSOLE = """\
import json, os, pathlib, signal, sys, time
run_dir = pathlib.Path(sys.argv[1].partition("=")[2], sys.argv[2].partition("=")[2])
run_dir.mkdir(parents=True, exist_ok=True)
told = run_dir / "told.jsonl"
number = len(told.read_text().splitlines()) if told.exists() else 0
names = ("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS")
with told.open("a") as file:
    file.write(json.dumps({"words": sys.argv[3:], **{name: os.environ.get(name) for name in names}}) + "\\n")
act = json.loads(pathlib.Path(os.environ["ACTS"]).read_text())[number]
for file, lines in act.get("writes", {}).items():
    with (run_dir / file).open("a") as log:
        log.writelines(json.dumps(line) + "\\n" for line in lines)
if act.get("waits"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(act["exit_code"]))
    (run_dir / "waits").touch()
    signal.pause()
if act["exit_code"] < 0:
    os.kill(os.getpid(), -act["exit_code"])
sys.exit(act["exit_code"])
"""
SCONTROL = """\
echo "${0##*/} $*" >> "$CALLS"
case "${0##*/} $1" in
  "scontrol --oneliner")
    echo "JobId=17 JobState=RUNNING Restarts=$RESTARTS ExcNodeList=$EXCLUDED NodeList=$NODES_NOW BatchHost=n0" ;;
  "scontrol requeue" | scancel*) [ -z "$REFUSES" ] || { echo "$REFUSES" >&2; exit 1; } ;;
  sinfo*) echo "n0 mixed" ;;
esac
"""


def loss(iteration: int) -> dict[str, Any]:
    """Return a line of ``metrics.jsonl``."""
    return {"kind": "metrics", "iteration": iteration, "loss": 1.0}


@dataclass
class Play:
    """Batch job whose launchers are scripted."""

    folder: Path

    def start(
        self, acts: Sequence[Mapping[str, Any]], *words: str, nodes_now: str = "n[0-3]", **variables: str
    ) -> "subprocess.Popen[str]":
        """Start the batch job. Launcher n executes ``acts[n]``."""
        (self.folder / "acts.json").write_text(json.dumps(acts))
        (self.folder / "launcher.py").write_text(CONSOLE)
        programs = self.folder / "bin"
        for name in ("scontrol", "scancel", "sinfo"):
            write_program(programs, name, SCONTROL)
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "MFT_"))}
        environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "ACTS": str(self.folder / "acts.json")}
        environment |= {"CALLS": str(self.folder / "calls"), "NODES_NOW": nodes_now, "REFUSES": ""}
        environment["EXCLUDED"] = "(null)"
        environment["RESTARTS"] = variables.get("SLURM_RESTART_COUNT", "0")
        environment |= {**ALLOCATION, "PYTHONPATH": str(REPOSITORY), **variables}
        command = [str(self.folder / "launcher.py"), f"run.dir={self.folder}", "run.name=run", *words]
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_ft.control.slurm.batch_job", *command],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, acts: Sequence[Mapping[str, Any]], *words: str, **about: str) -> tuple[int, str]:
        """Run the batch job to its end. Return exit code and standard error."""
        process = self.start(acts, *words, **about)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    def claim(self) -> RunDir:
        """Claim the run's folder, as a living launcher does."""
        return RunDir.claim(
            RunConfig(dir=str(self.folder), name="run", resume="auto"), model_name="tiny", config_yaml="a: 1\n"
        )

    @property
    def reported(self) -> list[dict[str, Any]]:
        """Return the arguments with which each launcher was started."""
        return [json.loads(line) for line in (self.folder / "run" / "told.jsonl").read_text().splitlines()]

    @property
    def calls(self) -> list[str]:
        """Return the commands of Slurm that were called, except queries."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith(("scontrol --oneliner", "sinfo"))]

    @property
    def marker(self) -> dict[str, Any] | None:
        """Return how the job ended according to its marker."""
        path = self.folder / "run" / "slurm" / "17.json"
        return json.loads(path.read_text()) if path.exists() else None


def ignored_by(process: "subprocess.Popen[str]") -> set[int]:
    """Return the signals that a process ignores (proc(5), ``SigIgn``)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    mask = int(status["SigIgn"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def finished(*, is_complete: bool) -> dict[str, Any]:
    """Return the act of a launcher that ends as planned."""
    event = {"kind": "run_finished", "exit_code": 0, "reason": "done", "is_complete": is_complete}
    return {"exit_code": 0, "writes": {"events.jsonl": [event]}}


def test_a_run_that_ends_well(play: Play) -> None:
    acts = [finished(is_complete=True)]
    assert play.run(acts, "launch=slurm", MFT_SPARE_NODES="1") == (0, "job 17: end: the run is complete\n")
    assert play.marker == {"job_id": "17", "exit_code": 0, "reason": "the run is complete", "is_final": True}
    (reported,) = play.reported
    assert reported["words"] == ["launch=slurm", "launch.num_nodes=3", "nodes.num_spare_nodes=1"]
    assert reported["SLURM_NTASKS"] is None and reported["SLURM_JOB_NODELIST"] == "n0,n1,n2,n3"
    assert play.calls == []


def test_a_job_that_ends_before_the_run_does_lets_the_next_one_of_its_chain_continue(play: Play) -> None:
    code, errors = play.run([finished(is_complete=False)], MFT_CHAINED="1")
    assert (code, play.calls) == (0, [])
    assert play.marker is not None and not play.marker["is_final"]
    assert "before the end of the run" in errors


@pytest.mark.parametrize(
    ("sources", "continues"),
    [(["training.exit_after_minutes=5"], True), (["training.exit_after_minutes=5", "SIGINT"], False), ([], False)],
)
def test_a_job_that_ends_after_the_configured_minutes_lets_the_next_one_continue(
    play: Play, sources: list[str], continues: bool
) -> None:
    requests = [{"kind": "stop_requested", "source": source} for source in sources]
    code, _ = play.run([{"exit_code": 130, "writes": {"events.jsonl": requests}}], MFT_CHAINED="1")
    assert code == 130 and play.marker is not None and play.marker["is_final"] != continues
    assert (not play.calls) == continues, "the waiting jobs of the chain are cancelled"


def test_a_console_that_dies_is_followed_by_another_with_what_the_allocation_has_now(play: Play) -> None:
    lost = {"kind": "node_lost", "node": 1, "reason": "silent"}
    acts = [{"exit_code": -9, "writes": {"events.jsonl": [lost], "metrics.jsonl": [loss(4)]}}, {"exit_code": 0}]
    code, _ = play.run(acts, nodes_now="n[0,2-3]", MFT_SPARE_NODES="1")
    assert code == 0
    second = play.reported[1]
    assert second["words"] == ["launch.num_nodes=3", "nodes.num_spare_nodes=0", "run.resume=auto"]
    assert (second["SLURM_JOB_NODELIST"], second["SLURM_JOB_NUM_NODES"]) == ("n0,n2,n3", "3")
    attempts = [json.loads(line) for line in (play.folder / "run/slurm/attempts.jsonl").read_text().splitlines()]
    assert [attempt["lost_hosts"] for attempt in attempts] == [["n1"], []]
    assert [attempt["iteration"] for attempt in attempts] == [4, 4]


def test_without_progress_it_ends_with_the_code_that_the_site_asked_for(play: Play) -> None:
    acts = [{"exit_code": 7}] * 4
    code, errors = play.run(acts, MFT_FINAL_EXIT_CODE="93")
    assert (code, len(play.reported)) == (93, 3)
    assert "consecutive attempts without progress beyond iteration" in errors
    assert play.marker is not None and play.marker["exit_code"] == 93


def test_a_warning_lets_the_console_save_and_requeues_without_an_end_marker(play: Play) -> None:
    failed = {"kind": "rank_failed", "node": 2, "first": True}
    acts = [
        {"exit_code": 7, "writes": {"events.jsonl": [failed, failed], "metrics.jsonl": [loss(3)]}},
        {"exit_code": 130, "waits": True, "writes": {"metrics.jsonl": [loss(9)]}},
    ]
    process = play.start(acts, MFT_SPARE_NODES="1", EXCLUDED="n[8-9]")
    wait_until("the launcher waits", (play.folder / "run" / "waits").exists)
    process.send_signal(signal.SIGUSR1)
    wait_until("Slurm was called", lambda: len(play.calls) == 2)
    assert play.calls == ["scontrol requeue 17", "scontrol update jobid=17 ExcNodeList=n8,n9,n2"]
    assert play.marker is None
    assert {signal.SIGUSR1, signal.SIGTERM} <= ignored_by(process), "Slurm can send a signal while scontrol still runs"
    process.kill()
    process.communicate()


def test_where_slurm_refuses_to_requeue_the_job_ends_and_says_so(play: Play) -> None:
    code, _ = play.run([{"exit_code": 7}], nodes_now="n0", REFUSES="Requeue is disabled")
    assert code == 7
    assert play.marker is not None and "Requeue is disabled" in play.marker["reason"]


def test_a_request_to_end_ends_it(play: Play) -> None:
    process = play.start([{"exit_code": 130, "waits": True}])
    wait_until("the launcher waits", (play.folder / "run" / "waits").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert play.marker is not None and play.marker["reason"] == "the run received a signal to end"
    assert play.calls == []


def test_a_job_that_somebody_else_requeues_leaves_no_marker(play: Play) -> None:
    process = play.start([{"exit_code": 130, "waits": True}], RESTARTS="1")
    wait_until("the launcher waits", (play.folder / "run" / "waits").exists)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, play.marker) == (130, None)
    assert "an administrator or Slurm has requeued the job" in errors


def test_a_requeued_job_waits_until_the_console_before_has_ended(play: Play) -> None:
    earlier = play.claim()
    process = play.start([{"exit_code": 0}], SLURM_RESTART_COUNT="1")
    assert process.stderr is not None
    assert "waiting for an earlier launcher of this run to end" in process.stderr.readline()
    assert not (earlier.path / "told.jsonl").exists()
    earlier.release()
    assert process.wait(timeout=60) == 0
    process.stderr.close()
    assert len(play.reported) == 1


def test_who_does_not_end_is_not_waited_for_for_ever(play: Play) -> None:
    earlier = play.claim()
    code, _ = play.run([{"exit_code": 2}], SLURM_RESTART_COUNT="1", MFT_CONSOLE_SECONDS="0")
    earlier.release()
    assert (code, len(play.reported)) == (2, 1), "it is refused, and says why"


def test_a_warning_before_a_console_has_begun_starts_none(play: Play) -> None:
    earlier = play.claim()
    process = play.start([], SLURM_RESTART_COUNT="1", MFT_ON_WARNING="end")
    assert (
        process.stderr is not None and "waiting for an earlier launcher of this run to end" in process.stderr.readline()
    )
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    earlier.release()
    assert process.returncode == 130
    assert not (play.folder / "run" / "told.jsonl").exists()
    assert play.marker is not None and "warning signal" in play.marker["reason"]


def test_a_requeued_job_goes_on_and_takes_back_its_marker(play: Play) -> None:
    assert play.run([{"exit_code": 130}])[0] == 130
    assert play.marker is not None
    acts = [{"exit_code": 130}, {"exit_code": 2}]
    assert play.run(acts, SLURM_RESTART_COUNT="1")[0] == 2
    assert "run.resume=auto" in play.reported[1]["words"]
    assert play.marker["exit_code"] == 2


def test_a_chain_counts_its_jobs_together_and_ends_as_one(play: Play) -> None:
    chained = {"MFT_CHAINED": "1", "MFT_ON_WARNING": "end", "nodes_now": "n0"}
    for number in range(3):
        code, errors = play.run([{"exit_code": 7}] * 3, SLURM_JOB_ID=str(20 + number), **chained)
        assert code == 7, errors
    assert play.calls == ["scancel --me --name=lm --state=PENDING"], "only the last one: no progress in three jobs"
    assert all("run.resume=auto" in reported["words"] for reported in play.reported)


def test_a_chain_that_cannot_be_cancelled_changes_no_end(play: Play) -> None:
    code, errors = play.run([finished(is_complete=True)], MFT_CHAINED="1", REFUSES="slurmctld is down")
    assert code == 0 and play.marker is not None and play.marker["is_final"]
    assert "cannot cancel the waiting jobs named lm: " in errors and "slurmctld is down" in errors


def test_a_chain_without_a_name_is_refused() -> None:
    """Cancelling jobs without a name would cancel all waiting jobs of the user."""
    with pytest.raises(ConfigError, match="SLURM_JOB_NAME"):
        _Site.read({**ALLOCATION, "SLURM_JOB_NAME": "", "MFT_CHAINED": "1"})


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("MFT_SPARE_NODES", "-1", "a whole number"),
        ("MFT_MAX_FRUITLESS", "0", "from 1"),
        ("MFT_ON_WARNING", "resubmit", "requeue, end"),
        ("MFT_FINAL_EXIT_CODE", "256", "to 255"),
        ("SLURM_JOB_NODELIST", "n[", "nodelist"),
    ],
)
def test_a_site_that_makes_no_sense_is_refused(name: str, text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.*{part}"):
        _Site.read({**ALLOCATION, name: text})


def test_a_site_says_little() -> None:
    site = _Site.read({**ALLOCATION, "MFT_FINAL_EXIT_CODE": ""})
    assert (site.num_spares, site.max_fruitless, site.on_warning, site.final_exit_code) == (0, 3, Next.REQUEUE, None)


def test_a_count_that_is_none_is_refused_before_anything_starts(play: Play) -> None:
    code, errors = play.run([], "launch.num_nodes=many")
    assert code == ConfigError.exit_code
    assert "launch.num_nodes=many: must be a whole number" in errors


def test_a_job_that_could_not_find_its_run_again_is_refused(play: Play) -> None:
    command = [sys.executable, "-m", "megatron_ft.control.slurm.batch_job", "launcher.py", "run.dir=runs"]
    environment = {**os.environ, **ALLOCATION}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == ConfigError.exit_code
    assert "run.name" in done.stderr

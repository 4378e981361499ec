"""Runs jobs on a test's Slurm cluster through ``slurm/pretrain.sbatch``, with or without a model."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.testing.jobs import REPOSITORY, JobResult
from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until

SOON = ["detector.heartbeat_interval_seconds=0.5", "detector.heartbeat_timeout_seconds=3"]
"""Overrides with which a job detects lost nodes within a few seconds."""
OVER = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
)
"""Final states of a job in Slurm."""
START_SECONDS = 180.0
"""Time limit in seconds for six nodes on one small machine to import all modules and train for a while."""
END_SECONDS = 300.0


@dataclass(frozen=True)
class SlurmJob:
    """Submitted Slurm job, with the paths of its run folder and its log."""

    cluster: SlurmCluster
    number: str
    run_dir: Path
    log: Path

    def host_of(self, node: int) -> int:
        """Return the number of the cluster's node that runs node ``node`` of the job. Both numbers are equal, because
        Slurm allocates the cluster's nodes in order."""
        return node

    @property
    def num_consoles(self) -> int:
        """Return how many launchers (processes that start the job's nodes) a job without a model has had so far."""
        return (self.run_dir / "consoles").read_text().count("\n")

    @property
    def num_controllers(self) -> int:
        """Return how many controllers the job has had. Each launcher starts a controller, and replaces a controller
        that dies."""
        return int((self.run_dir / "control" / "epoch").read_text())

    def lines(self, file: str) -> list[dict[str, Any]]:
        """Return the parsed lines of a file in the run's folder. An unfinished last line is left out."""
        path = self.run_dir / file
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of kind ``kind``, from ``records.jsonl`` (job without a model) or ``events.jsonl``."""
        return [
            record
            for file in ("records.jsonl", "events.jsonl")
            for record in self.lines(file)
            if record["kind"] == kind
        ]

    def has(self, kind: str, count: int) -> bool:
        """Return whether the job has reported ``count`` records of a kind. Fail if it has ended with fewer records."""
        return self.will(lambda: len(self.records(kind)) >= count)

    @property
    def iteration(self) -> int:
        """Return the newest iteration that the job reported; 0 if there is none."""
        return max((line["iteration"] for line in self.lines("metrics.jsonl")), default=0)

    def will(self, condition: Callable[[], bool]) -> bool:
        """Return whether ``condition`` is true. Fail if it cannot become true any more, because the job has ended."""
        state = self.cluster.state_of(self.number)
        holds = condition()
        assert holds or (state not in OVER and not self.marker.exists()), f"{state}:\n{self.words()}"
        return holds

    def await_iteration(self, iteration: int) -> None:
        """Wait until the job has reported iteration ``iteration``."""
        reached = lambda: self.will(lambda: self.iteration >= iteration)  # noqa: E731
        wait_until(f"iteration {iteration} of job {self.number}", reached, seconds=START_SECONDS)

    @property
    def marker(self) -> Path:
        """Return the path of the file that marks the end of the job."""
        return self.run_dir / "slurm" / f"{self.number}.json"

    def end(self, *, seconds: float = END_SECONDS) -> dict[str, Any]:
        """Wait for the file that marks the job's end, and return its content."""
        over = lambda: self.marker.exists() or self.cluster.state_of(self.number) == "FAILED"  # noqa: E731
        wait_until(f"job {self.number} has ended", over, seconds=seconds)
        assert self.marker.exists(), self.words()
        return dict(json.loads(self.marker.read_text()))

    def result(self) -> JobResult:
        """Wait for the end of the job, and return its result."""
        return JobResult(self.end()["exit_code"], self.run_dir, self.log.read_text())

    def attempts(self) -> list[dict[str, Any]]:
        """Return the records that the Slurm script wrote: one for each of the job's launchers that has ended."""
        return self.lines("slurm/attempts.jsonl")

    def words(self) -> str:
        """Return the last 4,000 characters of each log file of the job, for error messages."""
        logs = [self.log, *sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in logs if path.exists())


@dataclass(frozen=True)
class Site:
    """Settings that a Slurm site makes in ``slurm/site.env``, and the folder for the files of jobs."""

    folder: Path
    spares: int = 0
    ranks_per_node: int = 1
    dummy: str | None = None
    """Function of ``megatron_ft/testing/dummy_rank.py`` that every rank runs; None to train a model."""
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables that a Slurm site sets for the scripts in ``slurm/``."""
        dummy = {"MFT_COMMAND": "-m megatron_ft.testing.dummy_entry", "MFT_DUMMY_ENTRY": self.dummy}
        return {
            "MFT_INTERFACE": "eth0",
            "MFT_PYTHON": sys.executable,
            "MFT_RUNS": str(self.folder / "runs"),
            "MFT_RANKS_PER_NODE": str(self.ranks_per_node),
            "MFT_SPARE_NODES": str(self.spares),
            "MFT_DRAIN_POLL_SECONDS": "1",
            "OMP_NUM_THREADS": "1",
            **({} if self.dummy is None else dummy),
            **self.extra,
        }


def submit(
    cluster: SlurmCluster,
    site: Site,
    overrides: Sequence[str],
    *,
    num_nodes: int = 4,
    name: str = "dummy",
    options: Sequence[str] = (),
) -> SlurmJob:
    """Submit a job through ``slurm/pretrain.sbatch``, as users do."""
    log = site.folder / f"{name}.log"
    words = ["--parsable", f"-N{num_nodes}", f"--output={log}", *options]
    words += ["slurm/pretrain.sbatch", f"run.name={name}", *SOON, *overrides]
    number = cluster.run("sbatch", *words, extra=site.variables, cwd=REPOSITORY).strip()
    return SlurmJob(cluster, number, site.folder / "runs" / name, log)

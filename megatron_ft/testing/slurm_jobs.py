"""Jobs that ``slurm/pretrain.sbatch`` starts on the cluster of a test, with a model or without."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.testing.jobs import REPOSITORY, JobResult
from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until

SOON = ["detector.heartbeat_interval_seconds=0.5", "detector.heartbeat_timeout_seconds=3"]
"""Overrides: lost nodes are seen soon."""
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
"""States of a job that comes to no other."""
START_SECONDS = 180.0
"""Six nodes of a small machine have imported what they need, and trained for a while."""
END_SECONDS = 300.0


@dataclass(frozen=True)
class SlurmJob:
    """A job that was submitted, and where it writes."""

    cluster: SlurmCluster
    number: str
    run_dir: Path
    log: Path

    def host_of(self, node: int) -> int:
        """Node of the cluster: allocations begin with its first."""
        return node

    @property
    def num_consoles(self) -> int:
        """Consoles that a job without a model has had."""
        return (self.run_dir / "consoles").read_text().count("\n")

    @property
    def num_controllers(self) -> int:
        """Controllers that there have been: one for each console, and more where one has died alone."""
        return int((self.run_dir / "control" / "epoch").read_text())

    def lines(self, file: str) -> list[dict[str, Any]]:
        """Whole lines of a log of its run."""
        path = self.run_dir / file
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Records of one kind: reports of ranks without a model, or events of a run that has one."""
        return [
            record
            for file in ("records.jsonl", "events.jsonl")
            for record in self.lines(file)
            if record["kind"] == kind
        ]

    def has(self, kind: str, count: int) -> bool:
        """Whether that many have been reported; a job that has ended will report none."""
        return self.will(lambda: len(self.records(kind)) >= count)

    @property
    def iteration(self) -> int:
        """Newest that has been reported."""
        return max((line["iteration"] for line in self.lines("metrics.jsonl")), default=0)

    def will(self, condition: Callable[[], bool]) -> bool:
        """Whether ``condition`` holds already; it has to before the job ends."""
        state = self.cluster.state_of(self.number)
        holds = condition()
        assert holds or (state not in OVER and not self.marker.exists()), f"{state}:\n{self.words()}"
        return holds

    def await_iteration(self, iteration: int) -> None:
        """Wait until an iteration has been reported."""
        reached = lambda: self.will(lambda: self.iteration >= iteration)  # noqa: E731
        wait_until(f"iteration {iteration} of job {self.number}", reached, seconds=START_SECONDS)

    @property
    def marker(self) -> Path:
        """File that exists once the job has ended."""
        return self.run_dir / "slurm" / f"{self.number}.json"

    def end(self, *, seconds: float = END_SECONDS) -> dict[str, Any]:
        """Wait for the job's marker; what it says."""
        over = lambda: self.marker.exists() or self.cluster.state_of(self.number) == "FAILED"  # noqa: E731
        wait_until(f"job {self.number} has ended", over, seconds=seconds)
        assert self.marker.exists(), self.words()
        return dict(json.loads(self.marker.read_text()))

    def result(self) -> JobResult:
        """Wait for the end of the job; returns its result."""
        return JobResult(self.end()["exit_code"], self.run_dir, self.log.read_text())

    def attempts(self) -> list[dict[str, Any]]:
        """Consoles that have ended, as the job keeps them."""
        return self.lines("slurm/attempts.jsonl")

    def words(self) -> str:
        """Its logs, for messages."""
        logs = [self.log, *sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in logs if path.exists())


@dataclass(frozen=True)
class Site:
    """A site's values, and where its jobs write."""

    folder: Path
    spares: int = 0
    ranks_per_node: int = 1
    dummy: str | None = None
    """Function of ``megatron_ft/testing/dummy_rank.py`` that is every rank; None trains a model."""
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """Variables that ``slurm/site.env`` leaves to a site."""
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
    """Submit a job through the script that users submit."""
    log = site.folder / f"{name}.log"
    words = ["--parsable", f"-N{num_nodes}", f"--output={log}", *options]
    words += ["slurm/pretrain.sbatch", f"run.name={name}", *SOON, *overrides]
    number = cluster.run("sbatch", *words, extra=site.variables, cwd=REPOSITORY).strip()
    return SlurmJob(cluster, number, site.folder / "runs" / name, log)

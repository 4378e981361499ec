"""Runs jobs on a test's Slurm cluster through ``slurm/pretrain_array.sbatch``. Each node of such a job is one task of
a Slurm job array."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.testing.jobs import REPOSITORY
from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until
from megatron_ft.testing.slurm_jobs import SOON, Site, SlurmJob

SLOW_SECONDS = 120.0
"""Seconds after which Slurm has detected a dead node and restarted its task, even on a loaded machine."""


@dataclass(frozen=True)
class SlurmArray(SlurmJob):
    """Submitted Slurm job array. ``log`` is the log file of task 0."""

    def tasks(self) -> dict[int, str]:
        """Return the state of those tasks of the array that are in Slurm's queue, by the task's index."""
        lines = self.cluster.run("squeue", "-h", "-r", "-o", "%F %K %T").splitlines()
        found = [line.split() for line in lines]
        return {int(index): state for array, index, state in found if array == self.number}

    def hosts(self) -> dict[int, int]:
        """Map the index of each running task to the number of the cluster's node on which the task runs."""
        lines = self.cluster.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%F %K %N").splitlines()
        found = [line.split() for line in lines]
        return {int(index): int(host.removeprefix("node")) for array, index, host in found if array == self.number}

    def host_of(self, node: int) -> int:
        """Return the number of the cluster's node on which node ``node`` of the job (the task ``node``) runs."""
        return self.hosts()[node]

    def will(self, condition: Callable[[], bool]) -> bool:
        """Return whether ``condition`` is true. Fail if it cannot become true any more, because the array has ended."""
        tasks = self.tasks()
        holds = condition()
        assert holds or (tasks and not self.marker.exists()), f"the array has ended\n{self.words()}"
        return holds

    def await_records(self, kind: str, count: int, *, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait until the job has reported ``count`` records of a kind, and return them. Fail if the array ends before
        that."""
        try:
            wait_until(f"{count} records {kind}", lambda: self.has(kind, count), seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}\n{self.tasks()}\n{self.words()}") from None
        return self.records(kind)

    def stop(self, task: int) -> None:
        """Send a task the signal that Slurm sends shortly before the task's time limit."""
        self.cluster.run("scancel", "--batch", "--signal=USR1", f"{self.number}_{task}")

    def end(self, *, seconds: float = SLOW_SECONDS) -> dict[str, Any]:
        """Wait until the array has left Slurm's queue. Return the content of the file that marks the job's end."""
        wait_until(f"array {self.number} has ended\n{self.words()}", lambda: not self.tasks(), seconds=seconds)
        assert self.marker.exists(), self.words()
        return dict(json.loads(self.marker.read_text()))


def submit_array(
    cluster: SlurmCluster, site: Site, overrides: Sequence[str], *, tasks: str, name: str = "dummy"
) -> SlurmArray:
    """Submit a job array through ``slurm/pretrain_array.sbatch``, as users do.

    Args:
        tasks: Indices of the tasks in the format of ``sbatch --array``.
    """
    options = ["--parsable", f"--array={tasks}", f"--output={site.folder}/slurm-%A_%a.log"]
    words = [*options, "slurm/pretrain_array.sbatch", f"run.name={name}", *SOON, *overrides]
    number = cluster.run("sbatch", *words, extra=site.variables, cwd=REPOSITORY).strip()
    return SlurmArray(cluster, number, site.folder / "runs" / name, site.folder / f"slurm-{number}_0.log")

"""Jobs that ``slurm/pretrain_array.sbatch`` starts on the cluster of a test: each node is a task of an array."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.testing.jobs import REPOSITORY
from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until
from megatron_ft.testing.slurm_jobs import SOON, Site, SlurmJob

SLOW_SECONDS = 120.0
"""Within it Slurm has found a node dead and started its task again, on a loaded machine too."""


@dataclass(frozen=True)
class SlurmArray(SlurmJob):
    """An array and where it writes; ``log`` is that of task 0."""

    def tasks(self) -> dict[int, str]:
        """State of each task that Slurm has in its queue."""
        lines = self.cluster.run("squeue", "-h", "-r", "-o", "%F %K %T").splitlines()
        found = [line.split() for line in lines]
        return {int(index): state for array, index, state in found if array == self.number}

    def hosts(self) -> dict[int, int]:
        """The node of the cluster that each running task is on."""
        lines = self.cluster.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%F %K %N").splitlines()
        found = [line.split() for line in lines]
        return {int(index): int(host.removeprefix("node")) for array, index, host in found if array == self.number}

    def host_of(self, node: int) -> int:
        """Node of the cluster that its task runs on."""
        return self.hosts()[node]

    def will(self, condition: Callable[[], bool]) -> bool:
        """Whether ``condition`` holds already; it has to before the job ends."""
        tasks = self.tasks()
        holds = condition()
        assert holds or (tasks and not self.marker.exists()), f"the array has ended\n{self.words()}"
        return holds

    def await_records(self, kind: str, count: int, *, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait until that many have been reported; a job that has ended will report none."""
        try:
            wait_until(f"{count} records {kind}", lambda: self.has(kind, count), seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}\n{self.tasks()}\n{self.words()}") from None
        return self.records(kind)

    def stop(self, task: int) -> None:
        """Send the signal that Slurm sends when a task's time limit is near."""
        self.cluster.run("scancel", "--batch", "--signal=USR1", f"{self.number}_{task}")

    def end(self, *, seconds: float = SLOW_SECONDS) -> dict[str, Any]:
        """Wait for the job's marker and for the array to leave the queue; what the marker says."""
        wait_until(f"array {self.number} is over\n{self.words()}", lambda: not self.tasks(), seconds=seconds)
        assert self.marker.exists(), self.words()
        return dict(json.loads(self.marker.read_text()))


def submit_array(
    cluster: SlurmCluster, site: Site, overrides: Sequence[str], *, tasks: str, name: str = "dummy"
) -> SlurmArray:
    """Submit an array through the script that users submit.

    Args:
        tasks: as ``sbatch --array`` has them.
    """
    options = ["--parsable", f"--array={tasks}", f"--output={site.folder}/slurm-%A_%a.log"]
    words = [*options, "slurm/pretrain_array.sbatch", f"run.name={name}", *SOON, *overrides]
    number = cluster.run("sbatch", *words, extra=site.variables, cwd=REPOSITORY).strip()
    return SlurmArray(cluster, number, site.folder / "runs" / name, site.folder / f"slurm-{number}_0.log")

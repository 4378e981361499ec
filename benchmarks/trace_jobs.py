"""The jobs of ``trace-replay``: consoles one after another in a run's folder, watched, killed and stopped."""

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.kill_peers import end_tree, records_of, wait_for
from benchmarks.source import ROOT
from megatron_ft.errors import EXIT_INTERRUPTED
from megatron_ft.failures.processes import processes_of

TIMEOUT_SECONDS = 240.0
BASE = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    "training.train_iterations=100000",
    "training.micro_batch_size=1",
    "training.global_batch_size=16",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "parallel.use_distributed_optimizer=false",
    "placement=overlap_search",
    "placement.min_replicas=2",
    "placement.num_slots_per_rank=6",
    "launch.ranks_per_node=1",
)


@dataclasses.dataclass(slots=True)
class Job:
    """One launcher after another in a run's folder, from one warm fork server."""

    folder: Path
    name: str
    words: Sequence[str]
    socket: str
    most_nodes: int
    console: "subprocess.Popen[bytes] | None" = None
    began: float = 0.0
    """Start of the present one, by the wall clock."""
    starts: list[float] = dataclasses.field(default_factory=list)
    """Start of each."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.folder / self.name

    def start(self, *words: str) -> None:
        """Start a launcher; reports of an earlier one do not count."""
        self.began = time.time()
        self.starts.append(self.began)
        places = [f"run.dir={self.folder}", f"run.name={self.name}", f"data.cache_dir={self.folder / 'cache'}"]
        places.append(f"launch.forkserver_socket={self.socket}")
        with self._log.open("ab") as log:
            self.console = subprocess.Popen(
                [sys.executable, "pretrain_moe.py", *BASE, *self.words, *places, *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def _log(self) -> Path:
        """Output of the launchers."""
        return self.folder / f"{self.name}.log"

    def alive(self) -> bool:
        """Whether the present launcher runs."""
        return self.console.poll() is None

    def iterations(self, until: float = float("inf")) -> list[dict[str, Any]]:
        """Records of iterations, by all consoles, up to a time."""
        found = [record for record in records_of(self.run_dir / "metrics.jsonl") if "loss" in record]
        return [record for record in found if record["time_unix_seconds"] <= until]

    def events(self) -> list[dict[str, Any]]:
        """All that the consoles have recorded."""
        return records_of(self.run_dir / "events.jsonl")

    def wait_for_an_iteration(self) -> float:
        """Seconds that the first iteration took to come. Raises TimeoutError."""
        wait_for(self.iterations, self.alive, "the first iteration")
        return time.time() - self.began

    def kill(self) -> None:
        """End all processes of the job at once, and return when none is left. Raises TimeoutError."""
        nodes = range(self.most_nodes)
        with processes_of(self.run_dir, nodes, 1) as found:
            end_tree(psutil.Process(self.console.pid))
            for process in (process for processes in found.values() for process in processes):
                process.send(signal.SIGKILL)
        self.console.wait(TIMEOUT_SECONDS)
        wait_for(self._is_gone, lambda: True, "the end of all ranks")

    def _is_gone(self) -> bool:
        with processes_of(self.run_dir, range(self.most_nodes), 1) as found:
            return not any(found.values())

    def stop(self) -> list[str]:
        """Ask the job to stop, as Ctrl-C does; what is wrong about its end."""
        if self.console is None:
            return ["it was not started"]
        if self.alive():
            self.console.send_signal(signal.SIGINT)
        try:
            code = self.console.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = None
        if code == EXIT_INTERRUPTED:
            return []
        said = self._log.read_text(errors="replace")[-4000:]
        return [f"no end within {TIMEOUT_SECONDS:g} s: {said}" if code is None else f"exit code {code}: {said}"]

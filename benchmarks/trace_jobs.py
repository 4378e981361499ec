"""Runs the jobs of ``trace-replay``: starts launchers one after another in a run's folder, watches, kills and stops
them."""

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
    """Launchers one after another in the folder of a run. Their ranks come from one fork server."""

    folder: Path
    name: str
    words: Sequence[str]
    socket: str
    most_nodes: int
    console: "subprocess.Popen[bytes] | None" = None
    began: float = 0.0
    """Wall-clock time at which the current launcher was started."""
    starts: list[float] = dataclasses.field(default_factory=list)
    """Wall-clock time at which each launcher was started."""

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run."""
        return self.folder / self.name

    def start(self, *words: str) -> None:
        """Start a launcher. Reports of earlier launchers no longer count."""
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
        """Return the file for the output of the launchers."""
        return self.folder / f"{self.name}.log"

    def alive(self) -> bool:
        """Return whether the current launcher runs."""
        return self.console.poll() is None

    def iterations(self, until: float = float("inf")) -> list[dict[str, Any]]:
        """Return the records of iterations by all launchers, up to a time."""
        found = [record for record in records_of(self.run_dir / "metrics.jsonl") if "loss" in record]
        return [record for record in found if record["time_unix_seconds"] <= until]

    def events(self) -> list[dict[str, Any]]:
        """Return all events that the launchers have recorded."""
        return records_of(self.run_dir / "events.jsonl")

    def wait_for_an_iteration(self) -> float:
        """Wait for the first iteration. Return the seconds that it took. Raises TimeoutError."""
        wait_for(self.iterations, self.alive, "the first iteration")
        return time.time() - self.began

    def kill(self) -> None:
        """Kill all processes of the job at the same time. Return when none is left. Raises TimeoutError."""
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
        """Request the job to stop, as Ctrl-C does. Return the problems of how it ended."""
        if self.console is None:
            return ["the job was not started"]
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
        return [
            f"the job did not end within {TIMEOUT_SECONDS:g} s: {said}" if code is None else f"exit code {code}: {said}"
        ]

"""Claim ``kill-to-commit``: time from the SIGKILL of a whole node to the next committed iteration, at random moments.

Jobs of four nodes with one rank each lose one node after another. Each lost node comes back
(``nodes.restart_lost_nodes``) before the next one is lost. A fault is a SIGKILL from outside to all processes of a node
at one instant: agent, snapshot server and rank. Its moment is drawn uniformly over an iteration, so that it may be
inside a collective. The time ends when the survivors report the first iteration after their membership has changed.
Some ranks receive SIGSTOP instead, and must first be detected by missing heartbeats.

Some jobs have expert replicas and one stage. Others have two stages of two ranks and the distributed optimizer, in
three variants: a kept layout with a spare that has built the lost part in advance, a kept layout with a spare that has
built nothing, and expert replicas without a spare. Jobs with a kept layout replay from windows of one iteration.

Two alternatives are measured for comparison: the same training restarted by ``torchrun --max-restarts`` from a dense
checkpoint of every iteration, and a plain loop with a model of comparable size under torchft. The join timeout of
torchft's lighthouse is 100 ms, because its default of 60 s would determine the result. The models' iterations differ in
length, so the result contains each system's iteration time. A trial is a fault that the job's own events name.
"""

import dataclasses
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.kill_peers import (
    MIN_RANKS,
    NUM_RANKS,
    SETTLED,
    Fault,
    Measured,
    measure_torchft,
    measure_torchrun,
    percentile,
    random_moment,
    records_of,
    wait_for,
)
from benchmarks.report import finish, parse_arguments
from megatron_ft.control.admin import AdminClient
from megatron_ft.failures.processes import processes_of
from megatron_ft.testing.jobs import forkserver, start, wait

ID = "kill-to-commit"
NUM_FAULTS, QUICK_FAULTS = 50, 2
NUM_LAYOUT_FAULTS = 20
"""Number of faults of each kind of job with two stages."""
NUM_TORCHRUN, NUM_TORCHFT = 5, 20
NUM_STOPS, QUICK_STOPS = 10, 1
FAULTS_PER_JOB = 6
HEARTBEAT_SECONDS = 2.0
"""Time without a heartbeat after which a rank is lost."""
ALLOWED_SECONDS = {50: 0.5, 95: 0.8}
"""Allowed time in addition to one iteration, by the percentage of faults that must not exceed it."""
NO_TIMEOUT_SECONDS = 5.0
"""Time that no fault may reach. It is half of the shortest timeout, so a shorter time cannot result from a timeout."""
SEED = 20261121
TIMEOUT_SECONDS = 240.0
WARM = "megatron_ft.mcore.rank_main:warm"
_MODEL = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
)
_REPLICAS = ("placement=overlap_search", "placement.min_replicas=2")
_PIPELINE = ("parallel.pipeline_model_parallel_size=2", "parallel.use_distributed_optimizer=true")
BASE = (*_MODEL, "parallel.use_distributed_optimizer=false", *_REPLICAS, "placement.num_slots_per_rank=6")
ELASTIC = (
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    f"launch.num_nodes={NUM_RANKS}",
    "launch.ranks_per_node=1",
    "nodes.restart_lost_nodes=true",
    "nodes.max_node_restarts=100",
    "nodes.join_window_seconds=0.1",
    "detector.heartbeat_interval_seconds=0.5",
    f"detector.heartbeat_timeout_seconds={HEARTBEAT_SECONDS:g}",
    f"detector.vanished_seconds={HEARTBEAT_SECONDS - 0.5:g}",  # must be below the timeout
)
_FEWER = ("snapshot.bandwidth_bytes_per_second=3e5", f"recovery.min_nodes={MIN_RANKS}")
_KEPT = (
    *_MODEL,
    *_PIPELINE,
    "snapshot.bandwidth_bytes_per_second=1e9",  # a window of one iteration
    "recovery.keep_layout=true",
    "nodes.num_spare_nodes=1",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Kind of job that loses nodes."""

    name: str
    words: tuple[str, ...]
    """Overrides besides ``ELASTIC``."""
    allowed_seconds: Mapping[int, float]
    """Allowed time in addition to one iteration, by the percentage of faults that must not exceed it."""
    has_spare: bool = False
    """Whether a spare takes the place of a lost node, which then comes back as a spare."""
    num_parts: int = 0
    """Number of parts of the model that a spare must have built before a node is lost."""


REPLICAS = Scenario(name="replicas", words=(*BASE, *_FEWER), allowed_seconds=ALLOWED_SECONDS)
# After the loss of two of four nodes, one rank of each stage must have a slot for each of the 8 experts.
_COPIES = (*_REPLICAS, "placement.num_slots_per_rank=8", "placement.state_copies=2")
LAYOUTS = (
    Scenario(
        name="stages_spare_prebuilt",
        words=(*_KEPT, "nodes.num_prebuilt_parts=2"),
        allowed_seconds={50: 0.3, 95: 0.8},
        has_spare=True,
        num_parts=2,
    ),
    Scenario(
        name="stages_spare",
        words=(*_KEPT, "nodes.num_prebuilt_parts=0"),
        allowed_seconds={50: 0.8, 95: 0.8},
        has_spare=True,
    ),
    Scenario(
        name="stages_replicas_spare",
        words=(*_KEPT, *_COPIES),
        allowed_seconds={50: 0.8, 95: 0.8},
        has_spare=True,
    ),
    Scenario(
        name="stages_replicas",
        words=(*_MODEL, *_PIPELINE, *_COPIES, *_FEWER),
        allowed_seconds={50: 0.8, 95: 0.8},
    ),
)
"""Jobs with two stages. In the first two, a spare has built both stages in advance, or nothing; the stage of the lost
node runs an iteration again. The other jobs have expert replicas and copies of optimizer shards, so that no iteration
runs again. Spares cannot build models with replicas in advance. In the last job, which has no spare, ranks get other
experts."""


@dataclasses.dataclass(slots=True)
class Bench:
    """Runs jobs with ranks from one fork server, which has already imported all modules."""

    folder: Path
    socket: str
    num_jobs: int = 0

    def measure(
        self,
        num_faults: int,
        rng: random.Random,
        number: signal.Signals = signal.SIGKILL,
        *,
        scenario: Scenario = REPLICAS,
    ) -> Measured:
        """Inject faults by one signal, in as many jobs as needed. A job that fails counts as one failed fault."""
        measured = Measured()
        while (done := len(measured.faults) + len(measured.problems)) < num_faults:
            self._job(min(FAULTS_PER_JOB, num_faults - done), rng, number, measured, scenario)
        return measured

    def _job(
        self, num_faults: int, rng: random.Random, number: signal.Signals, measured: Measured, scenario: Scenario
    ) -> None:
        self.num_jobs += 1
        run_dir = self.folder / f"job-{self.num_jobs:03d}"
        words = [*scenario.words, *ELASTIC]
        words += ["training.train_iterations=100000", f"run.dir={self.folder}", f"run.name={run_dir.name}"]
        words += [f"data.cache_dir={self.folder / 'cache'}", f"launch.forkserver_socket={self.socket}"]
        console = start([sys.executable, "pretrain_moe.py", *words])
        job = Job(run_dir, psutil.Process(console.pid), list(range(NUM_RANKS)), scenario)
        try:
            for _ in range(num_faults):
                job.wait_for_spare()
                measured.faults.append(job.fault(rng, number))
                job.wait_until_whole()
        except (TimeoutError, psutil.Error) as error:
            measured.problems.append(f"{run_dir.name}: {error}")
        finally:
            if console.poll() is None:
                console.send_signal(signal.SIGINT)
            wait(console, TIMEOUT_SECONDS)
            shutil.rmtree(run_dir, ignore_errors=True)


@dataclasses.dataclass(slots=True)
class Job:
    """Running job and its faults."""

    run_dir: Path
    console: psutil.Process
    nodes: list[int]
    """Nodes that a fault may hit."""
    scenario: Scenario = REPLICAS
    num_spares_taken: int = 0
    """Number of spares that have taken the place of a lost node."""

    def fault(self, rng: random.Random, number: signal.Signals) -> Fault:
        """Kill a node or stop its rank at a random moment, and measure the consequences.

        Args:
            number: Signal. SIGKILL is sent to all processes of the node, another signal only to its rank.

        Raises:
            TimeoutError: the job did not continue, or its events do not name the fault.
        """
        metrics = self.run_dir / "metrics.jsonl"
        settled = len(records_of(metrics)) + SETTLED
        wait_for(lambda: len(records_of(metrics)) > settled, self._alive, "iterations before the fault")
        pace = statistics.median(record["iteration_seconds"] for record in records_of(metrics)[-SETTLED:])
        victim = rng.choice(self.nodes)
        with processes_of(self.run_dir, [victim], 1) as found:
            processes = [p for p in found[victim] if number == signal.SIGKILL or p.log.startswith("rank-")]
            random_moment(rng, pace)
            hit_at = time.time()
            hit = [process.log for process in processes if process.send(number)]
        if not any(log.startswith("rank-") for log in hit):
            raise TimeoutError(f"no process of node {victim} writes to the log of its rank")
        change = wait_for(
            lambda: self._change_without(victim, hit_at), self._alive, f"a membership without node {victim}"
        )
        first = wait_for(lambda: self._after(change), self._alive, "an iteration after it")[0]
        ended_at = change["time_unix_seconds"]
        committed = [r["iteration"] for r in records_of(metrics) if r["time_unix_seconds"] < ended_at]
        return Fault(
            seconds=first["time_unix_seconds"] - hit_at,
            iterations_lost=max(0, max(committed) - change["iteration"]),
            iteration_seconds=pace,
            details={
                "node": victim,
                "processes": hit,
                "iteration": change["iteration"],
                "reforming_seconds": change["seconds"],
                "load": os.getloadavg()[0],
                **self._parts(hit_at, change, first["time_unix_seconds"]),
            },
        )

    def _parts(self, hit_at: float, change: Mapping[str, Any], end: float) -> dict[str, Any]:
        """Return the durations of the parts of a recovery that keeps the layout, and what the replacing node had built;
        an empty dictionary for other recoveries."""
        events = [r for r in records_of(self.run_dir / "events.jsonl") if r["time_unix_seconds"] >= hit_at]
        shares = [r for r in events if r["kind"] == "stage_recovery" and r["generation"] == change["generation"]]
        if not shares:
            return {}
        (new,) = (share for share in shares if share["built"] != "kept")
        seen = [r["time_unix_seconds"] for r in events if r["kind"] in ("node_lost", "rank_failed")]
        began, ready = new["began_unix_seconds"], change["time_unix_seconds"]
        return {
            "built": new["built"],
            "num_replayed": new["num_iterations"],
            "detection_seconds": min(seen) - hit_at,
            "forming_seconds": began - new["build_seconds"] - min(seen),
            "build_seconds": new["build_seconds"],
            "replay_seconds": new["seconds"],
            "rest_seconds": ready - began - new["seconds"],
            "iteration_seconds": end - ready,
        }

    def _alive(self) -> bool:
        return self.console.is_running() and self.console.status() != psutil.STATUS_ZOMBIE

    def wait_for_spare(self) -> None:
        """Wait until a spare can take the place of a lost node, and has built what it should build. Raises
        TimeoutError."""
        if not self.scenario.has_spare:
            return
        num_parts = self.scenario.num_parts * (self.num_spares_taken + 1)

        def is_ready() -> bool:
            built = [r for r in records_of(self.run_dir / "events.jsonl") if r["kind"] == "part_built"]
            # The job's controller can be asked only after it has started.
            has_begun = bool(records_of(self.run_dir / "metrics.jsonl"))
            return len(built) >= num_parts and has_begun and bool(AdminClient(self.run_dir).status()["waiting"])

        wait_for(is_ready, self._alive, "a spare")

    def wait_until_whole(self) -> None:
        """Wait for a membership of all nodes, if there is no spare. Raises TimeoutError."""
        if self.scenario.has_spare:
            self.nodes = list(self._changes()[-1]["nodes"])
            self.num_spares_taken += 1
            return
        wait_for(lambda: set(self._changes()[-1]["nodes"]) >= set(self.nodes), self._alive, "the node that comes back")

    def _changes(self) -> list[dict[str, Any]]:
        return [r for r in records_of(self.run_dir / "events.jsonl") if r["kind"] == "membership_changed"]

    def _change_without(self, node: int, since: float) -> dict[str, Any] | None:
        """Return the first change of membership after ``since`` if it excludes ``node``; otherwise None."""
        changes = [change for change in self._changes() if change["time_unix_seconds"] >= since]
        return changes[0] if changes and node not in changes[0]["nodes"] else None

    def _after(self, change: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the iterations that the membership begun by ``change`` has committed."""
        since = change["time_unix_seconds"]
        return [
            record
            for record in records_of(self.run_dir / "metrics.jsonl")
            if record["iteration"] > change["iteration"] and record["time_unix_seconds"] >= since
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all systems, and judge the figures of this project."""
    arguments = parse_arguments(__doc__, argv)
    num_faults, num_stops = (QUICK_FAULTS, QUICK_STOPS) if arguments.quick else (NUM_FAULTS, NUM_STOPS)
    with tempfile.TemporaryDirectory(prefix="kill-to-commit-") as name:
        folder, rng = Path(name), random.Random(SEED)
        with forkserver(WARM) as socket:
            bench = Bench(folder, socket)
            ours = bench.measure(num_faults, rng)
            stopped = bench.measure(num_stops, rng, signal.SIGSTOP)
            num_layout_faults = QUICK_FAULTS if arguments.quick else NUM_LAYOUT_FAULTS
            layouts = {scenario.name: bench.measure(num_layout_faults, rng, scenario=scenario) for scenario in LAYOUTS}
        words = [*BASE, f"data.cache_dir={folder / 'cache'}"]
        peers = {}
        if not arguments.quick:  # torchrun takes a quarter of a minute for each, torchft has to be installed
            peers["torchrun"] = measure_torchrun(words, folder, NUM_TORCHRUN, rng)
            peers["torchft"] = measure_torchft(folder, NUM_TORCHFT, rng)
    return judge(
        arguments,
        ours,
        stopped,
        peers,
        layouts,
        num_faults=num_faults,
        num_stops=num_stops,
        num_layout_faults=num_layout_faults,
    )


def judge(
    arguments: Any,
    ours: Measured,
    stopped: Measured,
    peers: dict[str, Measured],
    layouts: dict[str, Measured],
    *,
    num_faults: int,
    num_stops: int,
    num_layout_faults: int,
) -> int:
    """Write the result. The bounds apply to this project; the figures of the alternatives are only reported.

    Args:
        layouts: faults of each of ``LAYOUTS``, by its name.
    """
    seconds = [fault.seconds for fault in ours.faults]
    silent = [fault.seconds for fault in stopped.faults]
    iteration = statistics.median(fault.iteration_seconds for fault in ours.faults) if ours.faults else 0.0
    every = (ours, stopped, *layouts.values())
    lost = sum(fault.iterations_lost for measured in every for fault in measured.faults)
    all_there = (len(seconds), len(silent)) == (num_faults, num_stops)
    all_there = all_there and all(len(measured.faults) == num_layout_faults for measured in layouts.values())
    complete = all_there and not any(measured.problems for measured in every) and lost == 0
    in_time = (
        complete
        and all(percentile(seconds, percent) <= iteration + allowed for percent, allowed in ALLOWED_SECONDS.items())
        and max(seconds) < NO_TIMEOUT_SECONDS
        and percentile(silent, 95) <= iteration + ALLOWED_SECONDS[95] + HEARTBEAT_SECONDS
        and all(_is_in_time(layouts[scenario.name], scenario) for scenario in LAYOUTS if scenario.name in layouts)
    )
    passed = complete and (in_time or arguments.quick)  # beside other tests, times are not meaningful
    others = "".join(f"; {name} {measured.figure()}" for name, measured in {**layouts, **peers}.items())
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=f"whole nodes killed: {ours.figure()} (an iteration {iteration:.2f} s); stopped ranks, silent for "
        f"{HEARTBEAT_SECONDS:g} s: {stopped.figure()}{others}",
        threshold=f"of {num_faults} whole nodes p50 <= one iteration + {ALLOWED_SECONDS[50]:g} s, p95 <= one iteration "
        f"+ {ALLOWED_SECONDS[95]:g} s, none of {NO_TIMEOUT_SECONDS:g} s, none loses an iteration; "
        f"{HEARTBEAT_SECONDS:g} s more for stopped ranks; with two stages p50 <= one iteration + 0.3 s with a spare "
        "that has built in advance, otherwise + 0.8 s, p95 <= one iteration + 0.8 s",
        counts={
            "faults": len(seconds),
            "stopped": len(silent),
            "failed": sum(len(measured.problems) for measured in every),
            "iterations_lost": lost,
            **{f"{name}_faults": len(measured.faults) for name, measured in {**layouts, **peers}.items()},
        },
        details={
            name: {
                "faults": [dataclasses.asdict(fault) for fault in measured.faults],
                "problems": [_without_paths(problem) for problem in measured.problems],
            }
            for name, measured in {"ours": ours, "stopped": stopped, **layouts, **peers}.items()
        },
    )


def _is_in_time(measured: Measured, scenario: Scenario) -> bool:
    seconds = [fault.seconds for fault in measured.faults]
    iteration = statistics.median(fault.iteration_seconds for fault in measured.faults)
    return max(seconds) < NO_TIMEOUT_SECONDS and all(
        percentile(seconds, percent) <= iteration + allowed for percent, allowed in scenario.allowed_seconds.items()
    )


def _without_paths(text: str) -> str:
    """Return the beginning and the end of an error message, without paths of this machine."""
    clean = re.sub(r"(?:/[\w.@+-]+)+/?", "PATH", text)
    return clean if len(clean) <= 1500 else f"{clean[:300]} ... {clean[-1200:]}"


if __name__ == "__main__":
    sys.exit(main())

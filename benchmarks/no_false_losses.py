"""Claim ``no-false-losses``: no node is lost because of high load, although a vanished machine is found within seconds.

A job with expert replicas trains on three machines (network namespaces) beside 20 processes that use all the processor
time that they get. For two hours no node is lost and no rank is stopped for missing heartbeats or progress. Then one
machine is cut off while the load continues. Its loss must be found, which proves that the job was watched.

``--minutes N`` changes the duration. This script needs root.
"""

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import finish
from megatron_ft.testing.jobs import wait
from megatron_ft.testing.network_nodes import Network, network, why_impossible
from megatron_ft.testing.slurm_cluster import wait_until

ID = "no-false-losses"
NUM_NODES, NUM_BUSY = 3, 20
FULL_MINUTES, QUICK_MINUTES = 120.0, 0.5
START_SECONDS, FIND_SECONDS, END_SECONDS = 300.0, 30.0, 300.0
MAX_DETECTION_SECONDS = 4.0
JOB = (
    "model=moe_micro",
    "run.name=watched",
    f"launch.num_nodes={NUM_NODES}",
    "recovery.min_nodes=2",
    "placement=overlap_search",
    "placement.min_replicas=2",
    "placement.num_slots_per_rank=8",
    "parallel.use_distributed_optimizer=false",
    "training.train_iterations=100000000",
    "training.global_batch_size=12",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
)
LOSSES = ("node_lost", "rank_failed", "membership_changed", "ranks_restarted", "controller_replaced")


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Run ``NUM_BUSY`` busy processes."""
    with contextlib.ExitStack() as ending:
        for _ in range(NUM_BUSY):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ending.callback(process.wait)
            ending.callback(process.kill)
        yield


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(machines: Network, folder: Path, minutes: float) -> dict[str, Any]:
    """Run the job, and return what was counted."""
    job, run_dir = machines.start_training(folder, JOB), folder / "watched"
    num_iterations = lambda: len(read(run_dir / "metrics.jsonl"))  # noqa: E731
    decisions = lambda: read(run_dir / "decisions.jsonl")  # noqa: E731
    try:
        wait_until("the job trains", lambda: num_iterations() >= 5 or job.poll() is not None, seconds=START_SECONDS)
        with load():
            num_before, began = num_iterations(), time.monotonic()
            running: list[int] = []
            while time.monotonic() - began < 60 * minutes and job.poll() is None and not decisions():
                running.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
                time.sleep(1.0)
            num_trained = num_iterations() - num_before
            lost = [event for event in read(run_dir / "events.jsonl") if event["kind"] in LOSSES]
            has_ended = job.poll() is not None
            found_seconds = None
            if not has_ended and not decisions():
                machines.cut(1)
                cut_unix = time.time()
                wait_until("the loss is found", lambda: decisions() or job.poll() is not None, seconds=FIND_SECONDS)
                found = decisions()[0]
                if found["lost_nodes"] == [1] and "its machine vanished" in found["reason"]:
                    found_seconds = found["time_unix_seconds"] - cut_unix
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
    finally:
        output = wait(job, END_SECONDS)
    return {
        "num_trained": num_trained,
        "losses": lost,
        "has_ended": has_ended,
        "found_seconds": found_seconds,
        "running": statistics.median(running) if running else 0,
        "output": output[-4000:],
    }


def main() -> int:
    """Run the claim's script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help=f"run for {QUICK_MINUTES:g} minutes")
    parser.add_argument("--minutes", type=float, help=f"run for so long (default: {FULL_MINUTES:g})")
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    arguments = parser.parse_args()
    if (problem := why_impossible()) is not None:
        print(f"{ID}: {problem}", file=sys.stderr)
        return 1
    minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else FULL_MINUTES)
    with tempfile.TemporaryDirectory(prefix="mft-", dir="/tmp") as folder, network(NUM_NODES) as machines:
        seen = run(machines, Path(folder), minutes)
    num_losses, found = len(seen["losses"]), seen["found_seconds"]
    was_loaded = seen["running"] >= NUM_BUSY
    passed = (
        (arguments.quick or minutes >= FULL_MINUTES)
        and num_losses == 0
        and not seen["has_ended"]
        and was_loaded
        and seen["num_trained"] > 0
        and found is not None
        and found <= MAX_DETECTION_SECONDS
    )
    detection = "the loss was not found" if found is None else f"the loss was found after {found:.2f} s"
    figure = (
        f"{minutes:g} minutes with {seen['running']:g} running processes, {seen['num_trained']} iterations: "
        f"{num_losses} false losses; then one machine was cut off, and {detection}"
    )
    print(figure if passed else f"{figure}\n{seen['losses']}\n{seen['output']}")
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=figure,
        threshold=f"{FULL_MINUTES:g} minutes beside {NUM_BUSY} busy processes: 0 losses; then a machine that is cut "
        f"off is found within {MAX_DETECTION_SECONDS:g} s",
        counts={"iterations": seen["num_trained"], "false_losses": num_losses},
        details={name: value for name, value in seen.items() if name != "output"},
    )


if __name__ == "__main__":
    sys.exit(main())

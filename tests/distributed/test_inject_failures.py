"""Tests the command that injects failures on a running job: a node is killed and started again, or stopped for a
moment; a trace is replayed."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.failures.injecting import INJECTED_FILE
from megatron_ft.testing.jobs import start, wait
from tools import inject_failures

PATIENCE_SECONDS = 90.0
_WORDS = (
    "model=moe_micro",
    "placement=spread",
    "placement.num_slots_per_rank=8",  # two nodes hold everything twice
    "launch.num_nodes=3",
    "recovery.min_nodes=2",
    "nodes.join_window_seconds=0.1",
    "parallel.use_distributed_optimizer=false",
    "optimizer.lr_warmup_iterations=3",
    "training.train_iterations=100000",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "checkpoint.save_interval_iterations=5",
    "telemetry.wandb=disabled",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def run_dir(tmp_path: Path, warm_forkserver: str) -> Iterator[Path]:
    """Yield the folder of a job of three nodes, which trains until the test ends and then stops without an error."""
    words = [*_WORDS, f"run.dir={tmp_path}", "run.name=live", f"launch.forkserver_socket={warm_forkserver}"]
    console = start([sys.executable, "pretrain_moe.py", *words])
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        metrics = tmp_path / "live" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert console.poll() is None and time.monotonic() < deadline, "the job did not begin"
            time.sleep(0.1)
        yield tmp_path / "live"
    finally:
        if console.poll() is None:
            console.send_signal(signal.SIGINT)
        output = wait(console, 60)
    assert console.returncode == 130, output


def wait_for_changes(run_dir: Path, *memberships: list[int]) -> None:
    """Wait until exactly these memberships have begun and the last one has committed an iteration."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        events, metrics = (read(run_dir / name) for name in ("events.jsonl", "metrics.jsonl"))
        changes = [event for event in events if event["kind"] == "membership_changed"]
        found = [change["nodes"] for change in changes]
        if found == list(memberships) and metrics[-1]["iteration"] > changes[-1]["iteration"]:
            return
        assert time.monotonic() < deadline and len(found) <= len(memberships), f"the memberships of the job are {found}"
        time.sleep(0.1)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _failed_on_disk(event: dict[str, Any]) -> bool:
    """Return whether a save failed because its file could not grow. A save can also fail because a node was lost."""
    return event["kind"] == "checkpoint_failed" and "File too large" in event["error"]


def test_nodes_are_killed_added_stopped_and_replayed(run_dir: Path, tmp_path: Path) -> None:
    def inject(*words: str) -> int:
        return inject_failures.main([str(run_dir), *words])

    assert inject("--kill", "2", "--at-iteration", "3") == 0
    wait_for_changes(run_dir, [0, 1])
    assert inject("--add", "2") == 0
    wait_for_changes(run_dir, [0, 1], [0, 1, 2])
    assert inject("--stop", "1", "--for", "0.5") == 0

    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\r\n0,add,b\r\n0,add,c\r\n1000,remove,a\r\n1000,add,ignored\r\n9000,add,d\r\n")
    assert inject("--trace", str(trace)) == 0
    memberships = [[0, 1], [0, 1, 2], [1, 2], [0, 1, 2]]
    wait_for_changes(run_dir, *memberships)  # a process that was stopped for a moment is not lost

    deadline, seconds = time.monotonic() + PATIENCE_SECONDS, 1
    while not any(map(_failed_on_disk, read(run_dir / "events.jsonl"))):
        assert time.monotonic() < deadline, "no save came while the disks failed"
        assert inject("--disk-error", "0", "1", "2", "--for", str(seconds)) == 0
        seconds *= 2  # longer than it takes from one save to the next
    newest = read(run_dir / "metrics.jsonl")[-1]["iteration"]
    while read(run_dir / "metrics.jsonl")[-1]["iteration"] < newest + 2:
        assert time.monotonic() < deadline, "the job did not train on"
        time.sleep(0.1)
    wait_for_changes(run_dir, *memberships)

    injected = [line for line in read(run_dir / INJECTED_FILE) if line["action"] != "disk_error"]
    actions = [(line["action"], line["nodes"]) for line in injected]
    assert actions == [("kill", [2]), ("add", [2]), ("stop", [1]), ("kill", [0]), ("add", [0])]
    kills = [line["processes"] for line in injected if line["action"] == "kill"]
    assert [sorted(kill) for kill in kills] == [["node-002.log", "rank-00002.log"], ["node-000.log", "rank-00000.log"]]

"""Tests the operators' commands on a running job: status, drain, add, and the prediction of a loss."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.errors import DataError
from megatron_ft.testing.jobs import start, wait
from tools import add_node, can_recover, drain, status

PATIENCE_SECONDS = 90.0
_WORDS = (
    "model=moe_micro",
    "placement=spread",
    "placement.num_slots_per_rank=6",
    "launch.num_nodes=3",
    "recovery.min_nodes=2",
    "nodes.join_window_seconds=0.1",
    "parallel.use_distributed_optimizer=false",
    "optimizer.lr_warmup_iterations=3",
    "training.train_iterations=100000",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def run_dir(tmp_path: Path, warm_forkserver: str) -> Iterator[Path]:
    """Yield the folder of a job of three nodes that trains until the test ends."""
    words = [*_WORDS, f"run.dir={tmp_path}", "run.name=live", f"launch.forkserver_socket={warm_forkserver}"]
    console = start([sys.executable, "pretrain_moe.py", *words])
    try:
        metrics = tmp_path / "live" / "metrics.jsonl"
        wait_for(lambda: console.poll() is not None or (metrics.exists() and metrics.read_text()))
        yield tmp_path / "live"
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            if console.poll() is None:
                console.send_signal(number)
        wait(console, 60)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the job did not come so far"
        time.sleep(0.1)


def test_a_node_is_drained_comes_back_and_is_judged_meanwhile(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked() -> dict[str, Any]:
        assert status.main([str(run_dir), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def judged(lost: str) -> tuple[int, dict[str, Any]]:
        """Return the answer of ``can_recover`` when the placement of the current membership is written."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (code := can_recover.main([str(run_dir), "--lose", lost, "--json"])) == DataError.exit_code:
            assert "try again" in capsys.readouterr().err and time.monotonic() < deadline
            time.sleep(0.1)
        output = capsys.readouterr()
        assert output.out, output.err
        return code, json.loads(output.out)

    assert asked()["members"] == [0, 1, 2]
    code, answer = judged("2")
    assert (code, answer["strategy"], answer["seconds_to_continue"]) == (0, "living_state", None)

    assert drain.main([str(run_dir), "2"]) == 0
    assert "node 2 will leave" in capsys.readouterr().out
    wait_for(lambda: asked()["members"] == [0, 1])
    assert drain.main([str(run_dir), "1"]) == 8
    assert "recovery.min_nodes" in capsys.readouterr().err
    code, answer = judged("1")
    assert (code, answer["strategy"]) == (9, "start_over"), "one node is too few, and nothing was saved"
    assert answer["declined"][0]["reason"] == "recovery.min_nodes=2 is more than the number of remaining nodes, 1"

    assert add_node.main([str(run_dir), "2"]) == 0
    assert "node 2 is being started" in capsys.readouterr().out
    wait_for(lambda: asked()["members"] == [0, 1, 2])
    assert status.main([str(run_dir)]) == 0
    assert "trains" in capsys.readouterr().out
    code, answer = judged("0")
    assert (code, answer["strategy"]) == (0, "living_state") and answer["seconds_to_continue"] > 0

"""Tests that ranks started by torchrun or srun agree on one run folder and report through rank 0."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from megatron_ft.control.ports import PORTS, free_port
from megatron_ft.errors import EXIT_INTERRUPTED
from megatron_ft.testing.jobs import start, wait
from megatron_ft.testing.slurm_cluster import wait_until
from tests.helpers.sharing import chosen

LIMIT_SECONDS = 90
RANK = ["-m", "tests.helpers.standalone_rank"]
RANK_COMMAND = [sys.executable, *RANK]


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options, *RANK]


def only_run(runs: Path) -> Path:
    (run,) = runs.iterdir()
    return run


@pytest.mark.extended
def test_torchrun(tmp_path: Path) -> None:
    job = start([*torchrun(), str(tmp_path), "5"])
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == 0, output
    run = only_run(tmp_path)
    assert run.name == "moe_tiny-001"
    assert {path.name for path in (run / "logs").iterdir()} == {"started-0", "started-1"}
    metrics = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [1, 2, 3, 4, 5]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world_size"], summary["exit_code"]) == (2, 0)


def test_a_restart_by_torchrun_continues_in_the_same_folder(tmp_path: Path) -> None:
    failpoint = 'raise(rank=1, at_iteration=3, phase="forward")'
    job = start([*torchrun("--max-restarts=1"), str(tmp_path), "5", failpoint])
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode != 0
    assert "injected fault (rank 1, iteration 3, forward)" in output
    hits = (only_run(tmp_path) / "failpoints.jsonl").read_text().splitlines()
    assert len(hits) == 2, "the fault hit both attempts, in one folder"


@pytest.mark.parametrize("name", chosen([None, "first"], ["first"]))
def test_a_restart_without_a_store_that_lasts_needs_the_runs_name(tmp_path: Path, name: str | None) -> None:
    """ft_launcher has no store that survives its restarts, and torchrun has none if its option excludes it."""
    failpoint = 'raise(rank=1, at_iteration=3, phase="forward")'
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | ({} if name is None else {"RUN_NAME": name})
    job = start([*torchrun("--max-restarts=1"), str(tmp_path), "5", failpoint], environment=variables)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode != 0
    if name is None:
        assert "run.name=null: must be given together with run.resume=auto" in output
        assert list(tmp_path.iterdir()) == [], "no attempt has begun"
    else:
        hits = (tmp_path / name / "failpoints.jsonl").read_text().splitlines()
        assert len(hits) == 2, "the fault hit both attempts, in one folder"


def srun_environment(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_ID": str(PORTS.index(port) // 16),
        "SLURM_STEP_ID": str(PORTS.index(port) % 16),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }


def ft_launcher_environment(rank: int, port: int, attempt: int) -> dict[str, str]:
    """Return the environment of a node with one rank, as ft_launcher 0.4.1 sets it."""
    return {
        "FT_RANK_MONITOR_IPC_SOCKET": "none",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "RUN_NAME": "first",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "WORLD_SIZE": "2",
    }


def test_a_rank_that_comes_late_finds_the_store_of_one_that_is_done(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    command = [*RANK_COMMAND, str(tmp_path), "2"]
    first = start(command, environment=srun_environment(0, port))
    wait_until("rank 0 is done", lambda: any(tmp_path.glob("*/summary.json")), seconds=LIMIT_SECONDS)
    late = start(command, environment=srun_environment(1, port))
    outputs = [wait(rank, LIMIT_SECONDS) for rank in (late, first)]
    assert [late.returncode, first.returncode] == [0, 0], outputs
    assert (only_run(tmp_path) / "logs" / "started-1").exists()


def test_nodes_that_count_starts_apart_start_together(tmp_path: Path) -> None:
    """A spare of ft_launcher that takes part for the first time has counted no start, while the other nodes have
    counted all."""
    port = free_port("127.0.0.1")
    ranks = [
        start([*RANK_COMMAND, str(tmp_path), "2"], environment=ft_launcher_environment(rank, port, attempt))
        for rank, attempt in ((0, 1), (1, 0))
    ]
    outputs = [wait(rank, LIMIT_SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert {path.name for path in (tmp_path / "first" / "logs").glob("started-*")} == {"started-0", "started-1"}


@pytest.mark.extended
def test_a_rank_that_comes_late_hears_why_rank_0_was_refused(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    (tmp_path / "runs").touch()
    command = [*RANK_COMMAND, str(tmp_path / "runs"), "2"]
    first = start(command, environment=srun_environment(0, port))
    rank_0 = psutil.Process(first.pid)
    listens = lambda: any(entry.laddr.port == port for entry in rank_0.net_connections())  # noqa: E731
    wait_until("rank 0 serves the store", listens, seconds=LIMIT_SECONDS)
    late = start(command, environment=srun_environment(1, port))
    outputs = [wait(rank, LIMIT_SECONDS) for rank in (late, first)]
    assert all(rank.returncode for rank in (late, first))
    assert "rank 0 could not start the run: run.dir=" in outputs[0]


def test_srun_and_a_forwarded_signal(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    command = [*RANK_COMMAND, str(tmp_path), "100000"]
    ranks = [start(command, environment=srun_environment(rank, port)) for rank in range(2)]
    run = None
    for _ in range(LIMIT_SECONDS * 20):
        run = next(iter(tmp_path.iterdir()), None)
        if run is not None and all((run / "logs" / f"started-{rank}").exists() for rank in range(2)):
            break
        signal.sigtimedwait([], 0.05)
    assert run is not None
    for rank in ranks:
        os.kill(rank.pid, signal.SIGUSR1)
    outputs = [wait(rank, LIMIT_SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [EXIT_INTERRUPTED] * 2, outputs
    assert json.loads((run / "summary.json").read_text())["exit_code"] == EXIT_INTERRUPTED

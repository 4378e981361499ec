"""Whole jobs of dummy ranks: start, end, death, interruption, and that nothing stays behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.control.agent import AgentSpec
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, ControlError, RankFailed, TrainingStopped
from tests.helpers.jobs import forkserver, start_dummy_job, wait

TWO_NODES = {"launch.num_nodes": 2, "launch.ranks_per_node": 2}
LIMIT_SECONDS = 30


def eventually(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """Wait for ``condition`` to be true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        threading.Event().wait(0.02)
    return value


def processes_of(runs: Path) -> list[psutil.Process]:
    """Everything that works for jobs below ``runs``: their consoles, node processes, fork servers and ranks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if any(str(runs) in text for text in [*process.cmdline(), *_logs(process)]):
                found.append(process)
    return found


def _logs(process: psutil.Process) -> list[str]:
    """Files behind standard output and error; none for a process that has ended."""
    with contextlib.suppress(OSError):
        return [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (1, 2)]
    return []


def rank_process(runs: Path, rank: int) -> psutil.Process:
    """The process whose standard output is the log of ``rank``."""
    log = str(runs / "dummy" / "logs" / f"rank-{rank:05d}.log")

    def find() -> psutil.Process | None:
        return next((found for found in processes_of(runs) if log in _logs(found)), None)

    found = eventually(find, f"rank {rank} starts")
    assert isinstance(found, psutil.Process)
    return found


def records(runs: Path) -> list[dict[str, Any]]:
    path = runs / "dummy" / "records.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def interrupt_twice(job: "subprocess.Popen[str]", runs: Path) -> float:
    """Ctrl-C, and again once the first was taken; when the second was sent, on the monotonic clock."""
    os.kill(job.pid, signal.SIGINT)
    eventually(lambda: any(record["kind"] == "stop_requested" for record in records(runs)), "the first is taken")
    assert job.poll() is None
    os.kill(job.pid, signal.SIGINT)
    return time.monotonic()


def assert_nothing_left(runs: Path) -> None:
    eventually(lambda: not processes_of(runs), f"all processes end; left: {processes_of(runs)}", seconds=8)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs go; sockets go to a short path beside it that must be empty at the end."""
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def no_sockets_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    eventually(lambda: not list(tmp_path.glob("megatron-ft-*")), "socket directories are removed")


def test_a_job_ends_well_and_its_records_arrive_in_order(runs: Path) -> None:
    job = start_dummy_job(runs, overrides={**TWO_NODES, "training.train_iterations": 10})
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_OK, output
    metrics = [record["iteration"] for record in records(runs) if record["kind"] == "metrics"]
    assert metrics == list(range(1, 11))
    assert records(runs)[-1]["kind"] == "closed"
    for rank in range(4):
        log = (runs / "dummy" / "logs" / f"rank-{rank:05d}.log").read_text()
        assert log == f"rank {rank} of 4 on node {rank // 2}\n"
    assert_nothing_left(runs)


def test_no_record_is_dropped_when_ranks_report_faster_than_the_sinks_write(runs: Path) -> None:
    job = start_dummy_job(runs, "run_chatty", overrides={**TWO_NODES, "training.train_iterations": 3000})
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_OK, output
    for rank in range(4):
        mine = [record["iteration"] for record in records(runs) if record.get("loss") == float(rank)]
        assert mine == list(range(1, 3001))


def output_of_failure(runs: Path, failpoint: str) -> str:
    """Output of a job on two nodes that a fault ends."""
    overrides = {**TWO_NODES, "training.train_iterations": 1000, "launch.failpoints": [failpoint]}
    job = start_dummy_job(runs, overrides=overrides)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == RankFailed.exit_code, output
    return output


def test_a_rank_that_raises_is_named_with_its_traceback(runs: Path) -> None:
    output = output_of_failure(runs, 'raise(rank=2, at_iteration=3, phase="backward")')
    assert "RANK 2 FAILED FIRST (node 1, iteration 3, phase backward), at " in output
    assert "raised megatron_ft.failpoints.InjectedFault: injected fault (rank 2, iteration 3, backward)" in output
    assert "dummy_rank.py" in output
    assert "run.name=dummy run.resume=" in output
    failed = [record for record in records(runs) if record["kind"] == "rank_failed"]
    assert [(record["rank"], record["node"], record["first"]) for record in failed] == [(2, 1, True)]
    assert_nothing_left(runs)


def test_a_killed_rank_is_named_and_the_hit_is_on_disk(runs: Path) -> None:
    output = output_of_failure(runs, 'kill(rank=1, at_iteration=4, phase="forward")')
    assert "RANK 1 FAILED FIRST (node 0, iteration 4, phase forward), at " in output
    assert "was killed by SIGKILL" in output
    hits = [json.loads(line) for line in (runs / "dummy" / "failpoints.jsonl").read_text().splitlines()]
    assert [(hit["action"], hit["rank"], hit["iteration"], hit["phase"]) for hit in hits] == [("kill", 1, 4, "forward")]
    assert_nothing_left(runs)


def test_a_rank_that_leaves_early_with_code_0_is_a_failure(runs: Path) -> None:
    output = output_of_failure(runs, 'exit(rank=3, at_iteration=2, phase="forward", code=0)')
    assert "exited with code 0 before its work was done" in output


def test_an_error_of_the_project_passes_its_exit_code_on(runs: Path) -> None:
    job = start_dummy_job(runs, "run_stopped_by_policy", overrides=TWO_NODES)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == TrainingStopped.exit_code, output
    assert "loss is NaN at iteration 3" in output


def test_a_lost_node_process_ends_the_job(runs: Path) -> None:
    job = start_dummy_job(runs, "run_stubborn", overrides=TWO_NODES)
    rank_process(runs, 3)
    node = next(found for found in processes_of(runs) if any("node-001.log" in name for name in _logs(found)))
    node.kill()
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == ControlError.exit_code
    assert "node 1 was lost: its process was killed by SIGKILL" in output
    assert_nothing_left(runs)


def test_one_interrupt_lets_ranks_finish_their_iteration(runs: Path) -> None:
    job = start_dummy_job(runs, overrides={**TWO_NODES, "training.train_iterations": 100000})
    eventually(lambda: len(records(runs)) >= 3, "training begins")
    os.kill(job.pid, signal.SIGINT)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_INTERRUPTED, output
    assert len(list((runs / "dummy" / "checkpoints").iterdir())) == 4, "each rank left its checkpoint"
    assert "run.name=dummy run.resume=must" in output
    assert [record["source"] for record in records(runs) if record["kind"] == "stop_requested"] == ["SIGINT"]
    assert_nothing_left(runs)


def test_an_interrupt_before_ranks_exist_ends_the_job(runs: Path) -> None:
    slow = ["tests.helpers.dummy_rank:take_time"]
    job = start_dummy_job(runs, "run_stubborn", overrides=TWO_NODES, preload=slow)
    eventually(lambda: (runs / "dummy" / "logs" / "rank-00003.log").exists(), "ranks are asked for")
    os.kill(job.pid, signal.SIGINT)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_INTERRUPTED, output
    assert "FAILED" not in output
    assert_nothing_left(runs)


def test_a_second_interrupt_ends_at_once(runs: Path) -> None:
    job = start_dummy_job(runs, "run_stubborn", overrides=TWO_NODES)
    eventually(lambda: len(records(runs)) >= 4, "all ranks run")
    begin = interrupt_twice(job, runs)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_INTERRUPTED, output
    assert time.monotonic() - begin < 5
    assert_nothing_left(runs)


def test_ranks_that_do_not_stop_in_time_are_killed(runs: Path) -> None:
    job = start_dummy_job(runs, "run_stubborn", overrides={**TWO_NODES, "launch.stop_timeout_seconds": 0.5})
    rank_process(runs, 3)
    os.kill(job.pid, signal.SIGTERM)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_INTERRUPTED, output
    assert_nothing_left(runs)


def test_nothing_outlives_a_killed_console(runs: Path) -> None:
    job = start_dummy_job(runs, "run_stubborn", overrides=TWO_NODES)
    for rank in range(4):
        rank_process(runs, rank)
    assert len(processes_of(runs)) == 8, "console, fork server, two nodes, four ranks"
    os.kill(job.pid, signal.SIGKILL)
    wait(job, LIMIT_SECONDS)
    assert_nothing_left(runs)


def test_a_warm_fork_server_starts_ranks_within_a_second_and_survives_the_job(runs: Path) -> None:
    with forkserver("tests.helpers.dummy_rank") as socket_path:
        overrides = {**TWO_NODES, "training.train_iterations": 2, "launch.forkserver_socket": socket_path}
        for name in ("first", "second"):
            begin = time.time()
            job = start_dummy_job(runs, overrides={**overrides, "run.name": name})
            output = wait(job, LIMIT_SECONDS)
            assert job.returncode == EXIT_OK, output
            started = [float((runs / name / "logs" / f"started-{rank}").read_text()) for rank in range(4)]
            assert max(started) - min(started) < 1.0
            assert max(started) - begin < 10.0


def test_a_fork_server_that_cannot_import_is_shown(runs: Path) -> None:
    job = start_dummy_job(runs, overrides=TWO_NODES, preload=["tests.helpers.no_such_module"])
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == ControlError.exit_code
    assert "ModuleNotFoundError: No module named 'tests.helpers.no_such_module'" in output


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("launch.interface", "0.0.0.0"),
        ("launch.interface", "192.0.2.1"),
        ("launch.forkserver_socket", "/nowhere/warm.sock"),
    ],
)
def test_places_that_cannot_work_are_refused_before_a_folder_is_made(runs: Path, key: str, value: str) -> None:
    job = start_dummy_job(runs, overrides={**TWO_NODES, key: value})
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == ConfigError.exit_code
    assert output.startswith(f"{key}={value}: must be")
    assert not (runs / "dummy").exists()


def test_a_run_in_use_is_refused(runs: Path) -> None:
    job = start_dummy_job(runs, "run_stubborn", overrides=TWO_NODES)
    rank_process(runs, 3)
    second = start_dummy_job(runs, "run_stubborn", overrides={**TWO_NODES, "run.resume": "auto"})
    output = wait(second, LIMIT_SECONDS)
    assert second.returncode == ConfigError.exit_code
    assert "is in use by a running job" in output
    interrupt_twice(job, runs)
    wait(job, LIMIT_SECONDS)


def test_a_node_with_a_wrong_token_is_refused(tmp_path: Path) -> None:
    from megatron_ft.control.controller import Controller
    from megatron_ft.control.membership import MembershipPolicy, Phase
    from tests.helpers.jobs import REPOSITORY

    policy = MembershipPolicy(num_nodes=1, ranks_per_node=1, start_timeout_seconds=60, stop_timeout_seconds=1)
    controller = Controller(policy, interface="127.0.0.1", token="a" * 64, start_order={})
    server = threading.Thread(target=controller.run, args=(lambda _: None, lambda _: None), daemon=True)
    server.start()
    (tmp_path / "sockets").mkdir(mode=0o700)
    with forkserver() as socket_path:
        spec = AgentSpec(
            controller_address=controller.address,
            token="b" * 64,
            node=0,
            runtime_dir=str(tmp_path / "sockets"),
            forkserver_socket=socket_path,
        )
        command = [sys.executable, "-m", "megatron_ft.control.agent"]
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as agent:
            assert agent.stdin is not None and agent.stderr is not None
            agent.stdin.write(spec.to_line())
            agent.stdin.flush()
            assert agent.wait(timeout=LIMIT_SECONDS) == ControlError.exit_code
            assert "wrong or missing token" in agent.stderr.read().decode()
    assert controller.state.phase is Phase.FORMING
    assert controller.state.joined == frozenset()
    from megatron_ft.control.membership import KillRequested

    controller.post(KillRequested())
    server.join(timeout=10)
    controller.close()

"""Tests whole jobs of dummy ranks: start, end, death, interruption, and that they leave nothing behind."""

import contextlib
import json
import os
import re
import shutil
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

from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, ControlError, RankFailed, TrainingStopped
from megatron_ft.testing.jobs import forkserver, start_dummy_job, wait
from tests.helpers.authority import make_authority
from tests.helpers.sharing import chosen

TWO_NODES = {"launch.num_nodes": 2, "launch.ranks_per_node": 2}
LIMIT_SECONDS = 30


def eventually(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """Wait until ``condition`` is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        threading.Event().wait(0.02)
    return value


def processes_of(runs: Path) -> list[psutil.Process]:
    """Return all processes of jobs below ``runs``: launchers, node processes, fork servers and ranks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if any(str(runs) in text for text in [*process.cmdline(), *_logs(process)]):
                found.append(process)
    return found


def _logs(process: psutil.Process) -> list[str]:
    """Return the files behind standard output and error of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (1, 2)]
    return []


def rank_process(runs: Path, rank: int) -> psutil.Process:
    """Return the process whose standard output is the log of ``rank``."""
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
    """Send Ctrl-C, and again when the first one was processed. Return the time of the second one on the monotonic
    clock."""
    os.kill(job.pid, signal.SIGINT)
    eventually(lambda: any(record["kind"] == "stop_requested" for record in records(runs)), "the first is taken")
    assert job.poll() is None
    os.kill(job.pid, signal.SIGINT)
    return time.monotonic()


def assert_nothing_left(runs: Path) -> None:
    eventually(lambda: not processes_of(runs), f"all processes end; left: {processes_of(runs)}", seconds=8)


@pytest.fixture(autouse=True)
def no_sockets_left(short_tmpdir: Path) -> Any:
    yield
    eventually(lambda: not list(short_tmpdir.glob("megatron-ft-*")), "socket directories are removed")


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
    """Return the output of a job on two nodes that a fault ends."""
    overrides = {**TWO_NODES, "training.train_iterations": 1000, "testing.failpoints": [failpoint]}
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
    assert "first fix the cause that the error names. Otherwise this command fails again" in output


def started(runs: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the arguments with which ranks were started, by generation."""
    found: dict[int, list[dict[str, Any]]] = {}
    for record in records(runs):
        if record["kind"] == "started":
            found.setdefault(record["generation"], []).append(record)
    return found


def test_all_ranks_start_again_after_one_was_killed(runs: Path) -> None:
    kill = 'kill(rank=1, at_iteration=5, phase="backward", generation=0)'
    overrides = {**TWO_NODES, "training.train_iterations": 8, "testing.failpoints": [kill], "recovery.max_restarts": 1}
    job = start_dummy_job(runs, "run_restarted", overrides=overrides)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_OK, output
    assert "FAILED" not in output
    ranks = {generation: sorted(start["rank"] for start in starts) for generation, starts in started(runs).items()}
    assert ranks == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    first, second = started(runs)[0][0], started(runs)[1][0]
    assert first["resume_from"] is None
    assert second["resume_from"] == str(runs / "dummy" / "checkpoints")
    assert first["master_port"] != second["master_port"]
    reported = [record for record in records(runs) if record["kind"] in ("rank_failed", "ranks_restarted")]
    assert [record["kind"] for record in reported] == ["rank_failed", "ranks_restarted"]
    assert (reported[0]["rank"], reported[0]["signal"], reported[0]["iteration"]) == (1, "SIGKILL", 5)
    assert (reported[1]["generation"], reported[1]["failed_ranks"], reported[1]["num_restarts_left"]) == (1, [1], 0)
    assert records(runs)[-1] == {"kind": "closed", "exit_code": 0, "reason": "all ranks have finished"}
    log = (runs / "dummy" / "logs" / "rank-00001.log").read_text()
    assert log == "rank 1 of 4 on node 0\n" * 2, "logs append"
    assert_nothing_left(runs)


def test_faults_that_are_apart_never_use_the_restarts_up(runs: Path) -> None:
    """Each generation fails later than the previous one. The failing ranks and the kinds of their failures change."""
    faults = [
        'kill(rank=0, at_iteration=2, phase="forward", generation=0)',
        'raise(rank=3, at_iteration=4, phase="backward", generation=1)',
        'exit(rank=2, at_iteration=5, phase="forward", generation=2, code=9)',
        'kill(node=1, at_iteration=7, phase="backward", generation=3)',
    ]
    overrides = {**TWO_NODES, "training.train_iterations": 8, "recovery.max_restarts": 1, "testing.failpoints": faults}
    job = start_dummy_job(runs, "run_restarted", overrides=overrides)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_OK, output
    assert sorted(started(runs)) == [0, 1, 2, 3, 4]
    assert len({starts[0]["master_port"] for starts in started(runs).values()}) > 1
    restarts = [record for record in records(runs) if record["kind"] == "ranks_restarted"]
    assert [record["failed_ranks"][0] for record in restarts][:3] == [0, 3, 2]
    assert restarts[3]["failed_ranks"][0] in (2, 3)
    assert_nothing_left(runs)


def test_a_fault_that_comes_again_and_again_ends_the_job(runs: Path) -> None:
    overrides = {**TWO_NODES, "training.train_iterations": 8, "recovery.max_restarts": 2}
    fault = 'raise(rank=2, at_iteration=3, phase="forward")'
    job = start_dummy_job(runs, "run_restarted", overrides={**overrides, "testing.failpoints": [fault]})
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == RankFailed.exit_code, output
    assert "RANK 2 FAILED FIRST (node 1, iteration 3, phase forward)" in output
    assert "Earlier generations (restarts of all ranks: 2):\n  generation 0: rank 2 raised" in output
    assert sorted(started(runs)) == [0, 1, 2]
    assert [record["rank"] for record in records(runs) if record["kind"] == "rank_failed"] == [2, 2, 2]
    assert_nothing_left(runs)


def test_an_error_of_the_project_is_not_tried_again(runs: Path) -> None:
    job = start_dummy_job(runs, "run_stopped_by_policy", overrides={**TWO_NODES, "recovery.max_restarts": 5})
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == TrainingStopped.exit_code, output
    assert not [record for record in records(runs) if record["kind"] == "ranks_restarted"]


def start_with_service(runs: Path, manner: str = "", **overrides: Any) -> "subprocess.Popen[str]":
    """Start a job on two nodes whose ranks call the service of their node."""
    settings = {**TWO_NODES, "training.train_iterations": 8, **overrides}
    sidecars = {"dummy": "megatron_ft.testing.dummy_sidecar"}
    environment = {"DUMMY_SERVICE": manner}
    return start_dummy_job(runs, "run_with_sidecar", overrides=settings, sidecars=sidecars, environment=environment)


def test_services_of_nodes_outlive_their_ranks_and_end_with_the_job(runs: Path) -> None:
    kill = 'kill(rank=3, at_iteration=4, phase="forward", generation=0)'
    job = start_with_service(runs, **{"testing.failpoints": [kill], "recovery.max_restarts": 1})
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_OK, output
    answers = [record for record in records(runs) if record["kind"] == "service"]
    assert len(answers) == 8, "four ranks, twice"
    processes = {node: {answer["process_id"] for answer in answers if answer["node"] == node} for node in (0, 1)}
    assert [len(found) for found in processes.values()] == [1, 1], "the same before and after the restart"
    assert processes[0] != processes[1]
    assert all(answer["trusted"] for answer in answers)
    addresses = answers[0]["addresses"]
    assert sorted(addresses) == ["0", "1"]
    assert len(set(addresses.values())) == 2
    assert all(answer["addresses"] == addresses for answer in answers)
    assert (runs / "dummy" / "logs" / "node-001-dummy.log").read_text() == "serving node 1\n"
    assert not [found for node in processes.values() for found in node if psutil.pid_exists(found)]
    assert_nothing_left(runs)


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("fails", ["sidecar dummy exited with code 3", "no memory"]),
        ("garbage", ["bytes that are not JSON|JSON list: must be an object"]),
        ("brittle", ["sidecar dummy was killed by SIGKILL while the job ran"]),
    ],
)
def test_a_service_that_ends_or_lies_ends_its_node(runs: Path, manner: str, words: list[str]) -> None:
    job = start_with_service(runs, manner, **{"recovery.max_restarts": 3, "training.train_iterations": 100000})
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == ControlError.exit_code, output
    assert "was lost: its process exited with code 8" in output
    for word in words:
        assert re.search(word, output), output
    assert_nothing_left(runs)


@pytest.mark.parametrize("killed", chosen(["console", "node"], ["node"]))
def test_no_service_outlives_what_started_it(runs: Path, killed: str) -> None:
    job = start_with_service(runs, "stubborn", **{"training.train_iterations": 100000})

    def service_of_node_1() -> list[int]:
        return [record["process_id"] for record in records(runs) if record["kind"] == "service" and record["node"]]

    (process_id, *_) = eventually(service_of_node_1, "a rank of node 1 has asked")
    if killed == "console":
        os.kill(job.pid, signal.SIGKILL)
    else:
        psutil.Process(psutil.Process(process_id).ppid()).kill()
        eventually(lambda: not psutil.pid_exists(process_id), "it dies with its node", seconds=5)
    wait(job, LIMIT_SECONDS)
    eventually(lambda: not processes_of(runs), "a stubborn service is killed by its node", seconds=20)


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
    job = start_dummy_job(runs, "run_restarted", overrides={**TWO_NODES, "training.train_iterations": 100000})
    # Rank 0 commits iterations before the others have connected; an interrupt before that kills all ranks.
    eventually(lambda: [record["kind"] for record in records(runs)].count("started") == 4, "all ranks have connected")
    os.kill(job.pid, signal.SIGINT)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_INTERRUPTED, output
    assert len(list((runs / "dummy" / "checkpoints").glob("iter_*/rank-*"))) == 4, "each rank left its checkpoint"
    assert "run.name=dummy run.resume=must" in output
    assert [record["source"] for record in records(runs) if record["kind"] == "stop_requested"] == ["SIGINT"]
    assert_nothing_left(runs)


def test_a_duration_ends_the_job_as_a_signal_does(runs: Path) -> None:
    overrides = {**TWO_NODES, "training.train_iterations": 100000, "training.exit_after_minutes": 0.15}
    job = start_dummy_job(runs, "run_restarted", overrides=overrides)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_INTERRUPTED, output
    (requested,) = [record["source"] for record in records(runs) if record["kind"] == "stop_requested"]
    assert requested == "training.exit_after_minutes=0.15"
    assert len(list((runs / "dummy" / "checkpoints").glob("iter_*/rank-*"))) == 4, "each rank left its checkpoint"
    assert "Stopped by training.exit_after_minutes=0.15" in output and "run.name=dummy run.resume=must" in output
    assert_nothing_left(runs)


def test_an_interrupt_before_ranks_exist_ends_the_job(runs: Path) -> None:
    slow = ["megatron_ft.testing.dummy_rank:take_time"]
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
    assert len(processes_of(runs)) == 9, "console, controller, fork server, two nodes, four ranks"
    os.kill(job.pid, signal.SIGKILL)
    wait(job, LIMIT_SECONDS)
    assert_nothing_left(runs)


def test_nothing_is_left_of_a_killed_console_whose_nodes_had_been_killed_before(runs: Path, short_tmpdir: Path) -> None:
    """An agent that was killed left its sockets behind. The last process of the job removes them, and the files that
    contain the token."""
    before = set(os.listdir("/dev/shm"))
    overrides = {**TWO_NODES, "recovery.min_nodes": 1, "training.train_iterations": 100000}
    job = start_dummy_job(
        runs, "run_surviving", overrides=overrides, sidecars={"dummy": "megatron_ft.testing.dummy_sidecar"}
    )
    eventually(lambda: len(started(runs).get(0, [])) == 4, "all ranks run")
    node = next(found for found in processes_of(runs) if any("node-001.log" in name for name in _logs(found)))
    node.kill()
    eventually(lambda: any(record["kind"] == "reformed" for record in records(runs)), "the other node continues")
    assert (runs / "dummy" / "controller.json").exists() and list(short_tmpdir.glob("megatron-ft-*"))
    os.kill(job.pid, signal.SIGKILL)
    wait(job, LIMIT_SECONDS)
    assert_nothing_left(runs)
    assert not list(short_tmpdir.glob("megatron-ft-*")), "the folder of sockets is gone with the last process"
    assert not (runs / "dummy" / "controller.json").exists()
    assert set(os.listdir("/dev/shm")) <= before


def test_a_warm_fork_server_starts_ranks_within_a_second_and_survives_the_job(runs: Path) -> None:
    with forkserver("megatron_ft.testing.dummy_rank") as socket_path:
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
        ("control.interface", "0.0.0.0"),
        ("control.interface", "192.0.2.1"),
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
    assert "is used by a running job" in output
    interrupt_twice(job, runs)
    wait(job, LIMIT_SECONDS)


def test_a_node_with_a_wrong_token_is_refused(tmp_path: Path) -> None:
    from megatron_ft.control.controller.controller import Controller
    from megatron_ft.control.membership.state import MembershipPolicy, Phase
    from megatron_ft.testing.jobs import REPOSITORY

    policy = MembershipPolicy(num_nodes=1, ranks_per_node=1, start_timeout_seconds=60, stop_timeout_seconds=1)
    controller = Controller(
        policy,
        interface="127.0.0.1",
        token="a" * 64,
        launch_spec=lambda _generation: {},
        record_decision=lambda _decision: None,
    )
    server = threading.Thread(target=controller.run, args=(lambda _record, _origin: None, lambda _: None), daemon=True)
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
        command = [sys.executable, "-m", "megatron_ft.control.node.agent"]
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as agent:
            assert agent.stdin is not None and agent.stderr is not None
            agent.stdin.write(spec.to_line())
            agent.stdin.flush()
            assert agent.wait(timeout=LIMIT_SECONDS) == ControlError.exit_code
            assert "wrong or missing token" in agent.stderr.read().decode()
    assert controller.state.phase is Phase.FORMING
    assert controller.state.nodes.registered == frozenset()
    from megatron_ft.control.membership.events import KillRequested

    controller.post(KillRequested())
    server.join(timeout=10)
    controller.close()


def test_a_job_whose_control_channel_is_encrypted(runs: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = make_authority(tmp_path / "authority")("machine")
    settings = {**TWO_NODES, "control.tls_dir": folder, "training.train_iterations": 3}
    job = start_dummy_job(runs, "run", overrides=settings)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == EXIT_OK, output
    assert [record["iteration"] for record in records(runs) if record["kind"] == "metrics"] == [1, 2, 3]

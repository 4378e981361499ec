"""Tests what is read from a Slurm allocation, and the commands for it. ``tests/slurm`` has jobs on a real cluster."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.main import NodeSpec
from megatron_ft.control.slurm.attempts import RunAttempts
from megatron_ft.control.slurm.nodes import Allocation, address_of, own_address
from megatron_ft.errors import ConfigError, ControlError

JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu[03-05],big1"}


class Entry(NamedTuple):
    """Address in the form in which psutil returns it."""

    family: int
    address: str


def test_nodes_are_numbered_in_the_order_of_the_allocation() -> None:
    allocation = Allocation.read(JOB, most_nodes=4)
    assert allocation == Allocation("17", ("gpu03", "gpu04", "gpu05", "big1"))


@pytest.mark.parametrize("missing", list(JOB))
def test_outside_of_an_allocation_nothing_is_started(missing: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.node_launcher=srun: needs a Slurm allocation"):
        Allocation.read({**JOB, missing: ""}, most_nodes=1)


def test_an_allocation_whose_nodes_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_JOB_NODELIST=gpu\[3-: must be a Slurm nodelist"):
        Allocation.read({**JOB, "SLURM_JOB_NODELIST": "gpu[3-"}, most_nodes=1)


def test_an_allocation_has_room_for_spares() -> None:
    with pytest.raises(ConfigError, match="needs 5 nodes, spares included, but job 17 has"):
        Allocation.read(JOB, most_nodes=5)


def test_a_step_is_of_one_node_and_outlives_the_others() -> None:
    words = Allocation.read(JOB, most_nodes=4).srun(2)
    assert words[0] == "srun"
    assert {"--jobid=17", "--nodelist=gpu05", "--nodes=1", "--ntasks=1"} < set(words)
    assert {"--no-kill", "--kill-on-bad-exit=0", "--overlap"} < set(words)


def test_the_marker_is_there_at_once_and_each_job_has_its_own(tmp_path: Path) -> None:
    for job, code in (("17", 8), ("18", 0)):
        RunAttempts(tmp_path).leave_marker(job, exit_code=code, reason="because", is_final=code == 0)
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "slurm").iterdir()}
    assert found == {
        "17.json": {"job_id": "17", "exit_code": 8, "reason": "because", "is_final": False},
        "18.json": {"job_id": "18", "exit_code": 0, "reason": "because", "is_final": True},
    }


def test_the_script_that_ran_is_kept(tmp_path: Path) -> None:
    Allocation("17", ("a",)).keep_script(tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "script").write_text("sbatch")
    Allocation("17", ("a",)).keep_script(tmp_path, str(tmp_path / "script"))
    assert (tmp_path / "slurm" / "17.sbatch").read_text() == "sbatch"


@pytest.mark.parametrize("interface", ["lo", "localhost", "127.0.0.1", "::1", "[::1]"])
def test_other_machines_do_not_reach_a_loopback(interface: str) -> None:
    with pytest.raises(ConfigError, match=r"control\.interface=.*other nodes can reach"):
        address_of(interface)


def test_an_interface_stands_for_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Entry(psutil.AF_LINK, "02:00:00:00:00:01")
    both = [link, Entry(10, "fe80::1%ib0"), Entry(2, "10.0.0.7")]
    interfaces = {"ib0": both, "ib1": both[:2], "ib2": [link]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert [address_of(name) for name in ("ib0", "ib1", "10.9.9.9", "head")] == [
        "10.0.0.7",
        "fe80::1",
        "10.9.9.9",
        "head",
    ]
    with pytest.raises(ConfigError, match="ib2: must have an IPv4 or IPv6 address"):
        address_of("ib2")


def test_the_address_towards_the_controller() -> None:
    assert own_address("127.0.0.1:20000") == "127.0.0.1"


def test_a_node_receives_its_spec_in_one_line() -> None:
    spec = NodeSpec(agent=_agent(), preload=["a", "b:c"])
    line = spec.to_line()
    assert line.count(b"\n") == 1
    assert NodeSpec.from_line(line) == spec


def test_a_node_without_a_spec_ends() -> None:
    command = [sys.executable, "-m", "megatron_ft.control.node.main"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        ControlError.exit_code,
        "node: standard input was closed before the node's spec arrived\n",
    )


def test_a_node_whose_fork_server_fails_ends(tmp_path: Path) -> None:
    spec = NodeSpec(agent=_agent(log_dir=str(tmp_path)), preload=["no_such_module"])
    command = [sys.executable, "-m", "megatron_ft.control.node.main"]
    done = subprocess.run(command, input=spec.to_line(), capture_output=True, timeout=60, check=False)
    assert done.returncode == ControlError.exit_code
    assert "no_such_module" in (tmp_path / "forkserver-003.log").read_text()


def _agent(log_dir: str = "logs") -> AgentSpec:
    about = {"controller_address": "127.0.0.1:20000", "token": "t", "runtime_dir": "", "forkserver_socket": ""}
    return AgentSpec(**about, node=3, process_id=12, log_dir=log_dir)

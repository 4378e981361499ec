"""Tests jobs that ``slurm/pretrain_array.sbatch`` starts, with one task of an array for each node. Ranks have no
model."""

import re
import sys
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY
from megatron_ft.testing.slurm_arrays import SLOW_SECONDS, SlurmArray, submit_array
from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until
from megatron_ft.testing.slurm_jobs import Site
from tests.slurm.test_jobs import KEEPS_LAYOUT, LOSES_NODES

pytestmark = pytest.mark.timeout(400)

LONG = "training.train_iterations=100000"


def test_a_chain_is_submitted_and_ends_when_the_run_is_done(cluster: SlurmCluster, tmp_path: Path) -> None:
    command = [sys.executable, "slurm/submit.py", "--shape=array", "--nodes=4", "--queued=1", "--chain=2"]
    words = ["run.name=dummy", "training.train_iterations=30", *KEEPS_LAYOUT]
    site = {**Site(tmp_path, dummy="run_surviving", spares=1).variables, "MFT_SBATCH": "--time=60"}
    with pytest.raises(AssertionError, match="so it was not submitted"):
        cluster.run(*command, *words, "run.resume=never", extra=site, cwd=REPOSITORY)
    assert cluster.run("squeue", "-h") == ""
    output = cluster.run(*command, *words, extra=site, cwd=REPOSITORY)
    numbers = re.search(r"job +(\d+), then (\d+)\n", output)
    assert numbers is not None, output
    array = SlurmArray(
        cluster, numbers[1], tmp_path / "runs" / "dummy", tmp_path / "runs" / f"slurm-{numbers[1]}_0.log"
    )
    assert array.end()["exit_code"] == 0, array.words()
    assert f"result    {array.marker}" in output
    started = array.records("started")
    assert sorted((record["node"], record["rank"]) for record in started) == [(0, 0), (1, 1), (2, 2)]
    wait_until("the chain's next is cancelled", lambda: cluster.run("squeue", "-h") == "")
    assert cluster.state_of(numbers[2]) == "CANCELLED"
    assert "set -- run.name=dummy" in (array.run_dir / "slurm" / f"{array.number}.sbatch").read_text()
    assert not (array.run_dir / "control" / "join.json").exists()
    assert not (array.log.with_name(f"slurm-{array.number}_3.log")).exists(), "the spare in the queue never ran"


def test_a_node_dies_and_comes_back_with_its_task(cluster: SlurmCluster, tmp_path: Path) -> None:
    array = submit_array(
        cluster, Site(tmp_path, dummy="run_surviving"), [*LOSES_NODES, "recovery.min_nodes=2", LONG], tasks="0-3"
    )
    array.await_records("started", 4)
    host = array.hosts()[2]
    cluster.kill_node(host)
    formed = array.await_records("reformed", 3)
    assert sorted(record["node"] for record in formed) == [0, 1, 3]
    wait_until("its task is in the queue", lambda: array.tasks()[2] == "PENDING", seconds=SLOW_SECONDS)
    assert {array.tasks()[task] for task in (0, 1, 3)} == {"RUNNING"}
    cluster.boot(host)
    formed = array.await_records("reformed", 7, seconds=SLOW_SECONDS)[3:]
    assert sorted((record["node"], record["rank"]) for record in formed) == [(node, node) for node in range(4)]
    assert array.num_consoles == 1
    array.stop(0)
    assert array.end()["exit_code"] == 130


def test_a_spare_in_the_queue_takes_the_place_of_a_node_that_dies(cluster: SlurmCluster, tmp_path: Path) -> None:
    array = submit_array(cluster, Site(tmp_path, dummy="run_surviving", spares=1), [*KEEPS_LAYOUT, LONG], tasks="0-3%3")
    array.await_records("started", 3)
    assert array.tasks()[3] == "PENDING"
    cluster.kill_node(array.hosts()[1])
    formed = array.await_records("reformed", 3, seconds=SLOW_SECONDS)
    assert sorted((record["node"], record["rank"]) for record in formed) == [(0, 0), (2, 2), (3, 1)]
    wait_until("the lost task waits as a spare", lambda: array.tasks()[1] == "PENDING", seconds=SLOW_SECONDS)
    array.stop(2)
    assert array.end()["exit_code"] == 130


def test_a_node_that_is_drained_leaves_well(cluster: SlurmCluster, tmp_path: Path) -> None:
    array = submit_array(
        cluster, Site(tmp_path, dummy="run_surviving"), [*LOSES_NODES, "recovery.min_nodes=2", LONG], tasks="0-3"
    )
    array.await_records("started", 4)
    host = array.hosts()[2]
    cluster.drain(host)
    (left,) = array.await_records("left", 1)
    assert left["leaving"] == [2]
    assert array.tasks() == dict.fromkeys(range(4), "RUNNING"), "its task waits for the end"
    assert f"node{host} is drained: node 2 leaves" in array.log.read_text()
    array.stop(0)
    assert array.end()["exit_code"] == 130


@pytest.mark.extended
def test_the_next_console_goes_on_with_the_nodes_that_are_there(cluster: SlurmCluster, tmp_path: Path) -> None:
    overrides = [*KEEPS_LAYOUT, "training.train_iterations=500"]
    array = submit_array(cluster, Site(tmp_path, dummy="run_surviving", spares=1), overrides, tasks="0-3%3")
    array.await_records("started", 3)
    hosts = array.hosts()
    cluster.kill_node(hosts[0])
    wait_until("there is another console", lambda: array.num_consoles == 2, seconds=SLOW_SECONDS)
    array.await_records("started", 3, seconds=SLOW_SECONDS)
    after = array.hosts()
    assert after.pop(0) not in hosts.values()
    assert after == {task: hosts[task] for task in (1, 2)}
    assert array.tasks()[3] == "PENDING", "it left its slot to task 0"
    assert array.end()["exit_code"] == 0, array.words()
    assert array.num_consoles == 2


@pytest.mark.extended
def test_a_console_that_comes_back_and_gets_nowhere_is_the_last(cluster: SlurmCluster, tmp_path: Path) -> None:
    site = Site(tmp_path, dummy="run_surviving", extra={"MFT_MAX_FRUITLESS": "1"})
    array = submit_array(cluster, site, [*LOSES_NODES, "recovery.min_nodes=2", LONG], tasks="0-2")
    array.await_records("started", 3)
    cluster.kill_node(array.hosts()[0])
    end = array.end()
    assert end["reason"] == "consecutive attempts without progress beyond iteration 0: 1"
    assert end["exit_code"] == 8 and array.num_consoles == 1
    (attempt,) = array.attempts()
    assert (attempt["job_id"], attempt["exit_code"]) == (array.number, None)


def test_a_console_that_is_cut_off_ends_before_the_next_begins(cluster: SlurmCluster, tmp_path: Path) -> None:
    overrides = [*KEEPS_LAYOUT, "nodes.restart_lost_nodes=true", LONG]
    array = submit_array(cluster, Site(tmp_path, dummy="run_surviving"), overrides, tasks="0-2")
    array.await_records("started", 3)
    host = array.hosts()[0]
    cluster.cut(host)
    wait_until("task 0 runs elsewhere", lambda: array.hosts().get(0, host) != host, seconds=SLOW_SECONDS)
    assert array.num_consoles == 1, "the first has the folder as long as it lives"
    cluster.heal(host)
    wait_until("there is another console", lambda: array.num_consoles == 2, seconds=SLOW_SECONDS)
    array.await_records("started", 3, seconds=SLOW_SECONDS)
    assert "in use" not in array.log.read_text()
    array.stop(0)
    assert array.end()["exit_code"] == 130


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.train_iterations=-1", "training.train_iterations=-1: "),
        ("nodes.num_spare_nodes=3", "launch.node_launcher=none: needs --array=0-6, one task for each node"),
    ],
)
def test_a_refused_configuration_ends_all_tasks(
    cluster: SlurmCluster, tmp_path: Path, override: str, message: str
) -> None:
    array = submit_array(cluster, Site(tmp_path, dummy="run"), [*KEEPS_LAYOUT, override], tasks="0-3%2")
    wait_until("all tasks are gone", lambda: not array.tasks())
    assert not array.marker.exists()
    assert message in array.log.read_text()

"""Tests that the cluster of these tests is a real one: nodes are separate, die at once, and can be cut off and
reconnected."""

from pathlib import Path

import psutil

from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until

COUNT = 'hostname -i > "$1/$SLURMD_NODENAME.address"; while echo >> "$1/$SLURMD_NODENAME"; do sleep 0.1; done'


def start_counting(cluster: SlurmCluster, folder: Path) -> str:
    """Start a job of four nodes whose tasks append a line to a file of their node ten times a second. Return its id."""
    step = f"srun --no-kill --kill-on-bad-exit=0 bash -c '{COUNT}' count {folder}"
    words = ["--parsable", "--no-kill", "-N4", f"--output={folder}/job.log", f"--wrap={step}"]
    job = cluster.run("sbatch", *words, cwd=folder).strip()
    for node in range(4):
        wait_until(f"node{node} counts", lambda node=node: count(folder, node) > 0)
    return job


def count(folder: Path, node: int) -> int:
    """Return the number of lines that a node has written."""
    path = folder / f"node{node}"
    return path.read_text().count("\n") if path.exists() else 0


def counts_on(folder: Path, node: int) -> None:
    """Wait until a node has written more lines."""
    before = count(folder, node)
    wait_until(f"node{node} counts on", lambda: count(folder, node) > before, seconds=10.0)


def tasks_on(cluster: SlurmCluster, node: int) -> list[psutil.Process]:
    """Return the counting processes on a node."""
    return [process for process in cluster.processes(node) if "count" in process.cmdline()]


def test_nodes_are_apart_and_one_that_dies_ends_alone(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = start_counting(cluster, tmp_path)
    addresses = {(tmp_path / f"node{node}.address").read_text().strip() for node in range(4)}
    assert addresses == {f"{cluster.network}.{10 + node}" for node in range(4)}
    cluster.kill_node(2)
    last = count(tmp_path, 2)
    wait_until("Slurm takes node2 for down", lambda: "node2" in cluster.nodes_in("down"))
    assert count(tmp_path, 2) == last, "its processes went with it"
    assert cluster.run("squeue", "-h", "-j", job, "-o", "%N %T").split() == ["node[0-1,3]", "RUNNING"]
    counts_on(tmp_path, 0)
    cluster.boot(2)
    wait_until("node2 is back", lambda: "node2" in cluster.nodes_in("idle"))


def test_a_node_that_is_cut_off_runs_on_unseen(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = start_counting(cluster, tmp_path)
    cluster.cut(1)
    wait_until("Slurm takes node1 for down", lambda: "node1" in cluster.nodes_in("down"))
    counts_on(tmp_path, 1)
    assert tasks_on(cluster, 1), "fencing is not Slurm's"
    assert cluster.state_of(job) == "RUNNING"
    cluster.heal(1)
    wait_until("node1 is back", lambda: "node1" in cluster.nodes_in("idle"))
    wait_until("Slurm has ended what ran there", lambda: not tasks_on(cluster, 1))

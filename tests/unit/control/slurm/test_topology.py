"""Tests that failure domains are leaf switches. ``TREE`` is output of Slurm 22.05 for a cluster of four nodes with
topology/tree."""

import os
from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.control.slurm.topology import _domains_of, _read_topology, summary, with_failure_domains
from megatron_ft.errors import ConfigError
from tests.helpers.keys import grouped
from tests.helpers.programs import write_program

TREE = """\
SwitchName=a Level=0 LinkSpeed=1 Nodes=node[0-1]
SwitchName=b Level=0 LinkSpeed=1 Nodes=node2
SwitchName=c Level=0 LinkSpeed=1 Nodes=node3
SwitchName=m1 Level=1 LinkSpeed=1 Nodes=node[0-2] Switches=a,b
SwitchName=m2 Level=1 LinkSpeed=1 Nodes=node3 Switches=c
SwitchName=top Level=2 LinkSpeed=1 Nodes=node[0-3] Switches=m[1-2]
"""
NO_PLUGIN = "echo 'scontrol: error: No topology information available' >&2"
"""Command with the output of Slurm without a topology plugin, and exit code 0."""


def site(folder: Path, script: str) -> dict[str, str]:
    """Return the environment of a batch job whose ``scontrol`` is a script."""
    write_program(folder, "scontrol", script)
    path = f"{folder}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[0-3]"}


def printing(text: str) -> str:
    return f"cat <<'END'\n{text}END"


def job(num_nodes: int, **keys: object) -> JobConfig:
    about = {"node_launcher": "srun", "failure_domain_source": "slurm_topology"}
    return from_dict(grouped(**{"num_nodes": num_nodes, **about, **keys}))


def test_a_nodes_domain_is_its_leaf_switch() -> None:
    assert _domains_of(["node3", "node0", "node2", "node1"], TREE) == ["c", "a", "b", "a"]


@pytest.mark.parametrize(
    ("topology", "output"),
    [
        (
            TREE.replace("b Level=0 LinkSpeed=1 Nodes=node2", "b Level=0 LinkSpeed=1"),
            "leaf switches of node2 in Slurm's topology: none",
        ),
        (TREE.replace("Nodes=node2", "Nodes=node[2-3]"), "leaf switches of node3 in Slurm's topology: b, c"),
        (
            TREE.replace("Nodes=node2", "Nodes=node[2-1]"),
            r"cannot read the nodes of switch b: Nodes=node\[2-1\]: has a range",
        ),
        ("BlockName=b1 BlockIndex=0 Nodes=node[0-3] BlockSize=4\n", "topology/tree, .*: BlockName=b1"),
    ],
)
def test_a_node_without_one_leaf_switch_is_refused(topology: str, output: str) -> None:
    with pytest.raises(ConfigError, match=rf"^topology\.failure_domain_source=slurm_topology: .*{output}"):
        _domains_of(["node0", "node1", "node2", "node3"], topology)


@pytest.mark.parametrize(
    ("script", "output"),
    [
        (NO_PLUGIN, "TopologyPlugin=topology/tree; .* prints: .*No topology information available. List"),
        ("exit 3", r"prints: nothing \(exit code 3\)"),
        (f"{printing(TREE)}\nexit 1", r"prints: nothing \(exit code 1\)"),
    ],
)
def test_without_a_topology_nothing_is_assumed(tmp_path: Path, script: str, output: str) -> None:
    with pytest.raises(ConfigError, match=output):
        _read_topology(site(tmp_path, script))


def test_without_scontrol_nothing_is_assumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`scontrol show topology` failed: .*No such file"):
        _read_topology({"PATH": str(tmp_path)})


def test_lines_are_read_whole(tmp_path: Path) -> None:
    variables = {**site(tmp_path, f"[ -z ${{SLURM_TOPO_LEN+x}} ] && {printing(TREE)}"), "SLURM_TOPO_LEN": "20"}
    assert _read_topology(variables) == TREE


def test_domains_are_of_the_nodes_of_the_job_and_its_spares(tmp_path: Path) -> None:
    config = with_failure_domains(job(2, num_spare_nodes=1), site(tmp_path, printing(TREE)))
    assert config == job(2, num_spare_nodes=1, failure_domain_source="listed", failure_domains=[*"aab"])
    assert config.member_domains == ["a", "a"]
    assert summary(config) == "failure domains from Slurm's topology: a (nodes 0, 1), b (nodes 2)"


def test_who_does_not_ask_is_not_answered() -> None:
    config = job(2, failure_domain_source="listed")
    assert with_failure_domains(config, {}) is config
    with pytest.raises(ConfigError, match="needs a Slurm allocation"):
        with_failure_domains(job(2), {})

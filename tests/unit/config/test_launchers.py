"""Tests that under torchrun, ft_launcher and srun every key of the control plane is refused by its name instead of
being ignored."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from megatron_ft.config.job import DetectorConfig, JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError
from tests.helpers.keys import grouped

LOSE = "lose(nodes=[1],before_iteration=5)"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "max_restarts": ({"max_restarts": 1}, "recovery.max_restarts"),
    "min_nodes": ({"min_nodes": 1}, "launch.mode"),
    "max_nodes": ({"max_nodes": 3}, "launch.mode"),
    "keep_processes": ({"keep_processes": True}, "recovery.keep_processes"),
    "num_spare_nodes": ({"num_spare_nodes": 1}, "launch.mode"),
    "restart_lost_nodes": ({"restart_lost_nodes": True}, "nodes.restart_lost_nodes"),
    "keep_layout": ({"keep_layout": True, "num_spare_nodes": 1}, "launch.mode"),
    "membership_schedule": ({"membership_schedule": [LOSE]}, "launch.mode"),
    "node_launcher": ({"node_launcher": "srun", "interface": "ib0"}, "launch.mode"),
    "failure_domain_source": ({"failure_domain_source": "slurm_topology"}, "topology.failure_domain_source"),
    "interface": ({"interface": "10.0.0.5"}, "control.interface"),
    "tls_dir": ({"tls_dir": "certificates"}, "control.tls_dir"),
    "forkserver_socket": ({"forkserver_socket": "warm.sock"}, "launch.forkserver_socket"),
    "stop_timeout_seconds": ({"stop_timeout_seconds": 5.0}, "launch.stop_timeout_seconds"),
}
MEANT_ELSEWHERE = {
    "mode": "says who starts ranks",
    "num_nodes": "taken from the launcher, and must agree",
    "ranks_per_node": "likewise",
    "ranks_per_gpu": "ranks of a machine share its GPUs in the same way with every launcher",
    "master_port": "srun serves the store there",
    "start_timeout_seconds": "the wait for rank 0's word",
    "failure_domains": "placement",
    "strategies": "ranks obey it when they load saved state; those that need nodes are refused by launch.mode",
    "failpoints": "ranks obey them",
    "link_bytes_per_second": "predictions",
    "gpu_memory_bytes": "limits, and the number of slots",
    "host_memory_bytes": "limits, and the number of slots",
    "num_prebuilt_parts": "only read with spares and a kept layout, which are refused",
    "join_window_seconds": "only read where nodes join, which is refused",
    "max_node_restarts": "only read with restart_lost_nodes",
    "position_timeout_seconds": "only read where nodes are lost",
    "reconfigure_timeout_seconds": "likewise",
}


def job(mode: str, keys: Mapping[str, Any] = MappingProxyType({}), **groups: dict[str, Any]) -> JobConfig:
    about_nodes = grouped(**{"num_nodes": 2, "mode": mode, **keys})
    return from_dict({**about_nodes, "parallel": {"use_distributed_optimizer": False}, **groups})


def test_every_key_about_nodes_is_refused_or_has_a_meaning() -> None:
    groups = ("launch", "nodes", "recovery", "topology", "limits", "control", "testing")
    keys = {field.name for group in groups for field in dataclasses.fields(getattr(JobConfig(), group))}
    assert keys == REFUSED.keys() | MEANT_ELSEWHERE.keys()


@pytest.mark.parametrize("mode", ["torchrun", "srun"])
@pytest.mark.parametrize("name", REFUSED)
def test_keys_of_the_control_plane_are_refused(mode: str, name: str) -> None:
    keys, key = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"^{key}="):
        validate(job(mode, keys))


@pytest.mark.parametrize("name", ["interface", "tls_dir", "forkserver_socket", "stop_timeout_seconds"])
def test_and_taken_where_node_processes_are(name: str) -> None:
    validate(job("local", REFUSED[name][0]))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(DetectorConfig)])
def test_keys_of_the_detector_are_refused(name: str) -> None:
    longer = {"detector": {name: 70.0 if name == "lost_controller_seconds" else 5.0}}
    validate(job("local", **longer))
    with pytest.raises(ConfigError, match=rf"^detector\.{name}=(5|70)\.0: must be left at .* no agent watches"):
        validate(job("torchrun", **longer))


def test_snapshots_are_refused() -> None:
    policy = {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"}
    snapshot = {"policy": policy, "num_peer_copies": 1}
    validate(job("local", snapshot=snapshot))
    for num_nodes in (1, 2):  # also where there are too few nodes for copies: another number of them would not help
        with pytest.raises(ConfigError, match=r"^snapshot\.policy=.*must be null with launch\.mode"):
            validate(job("torchrun", {"num_nodes": num_nodes}, snapshot=snapshot))


def test_only_srun_accepts_a_port_for_its_store() -> None:
    validate(job("srun", {"master_port": 23456}))
    with pytest.raises(ConfigError, match=r"^launch\.master_port=23456: must be left at 0.*MASTER_PORT"):
        validate(job("torchrun", {"master_port": 23456}))

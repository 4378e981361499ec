"""Tests that a recovery that a device refuses is also refused with ``training.device=auto`` if that device is
chosen."""

import pytest

from megatron_ft.config.validate import on_device, refused_devices, validate
from megatron_ft.errors import ConfigError
from pretrain_moe import compose

REPLICAS = ("placement=spread", "parallel.use_distributed_optimizer=false", "launch.num_nodes=4")
WINDOWS = ("snapshot=sparse_window", "launch.num_nodes=4", "snapshot.num_peer_copies=1")
RECOVERIES = {
    "min_nodes": (*REPLICAS, "recovery.min_nodes=3"),
    "max_nodes": (*REPLICAS, "nodes.max_nodes=5"),
    "spares": (*REPLICAS, "nodes.num_spare_nodes=1"),
    "membership_schedule": (*REPLICAS, "testing.membership_schedule=['lose(nodes=[2],before_iteration=5)']"),
}


@pytest.mark.parametrize("name", RECOVERIES)
def test_recoveries_that_ranks_on_cuda_refuse_are_refused_for_cuda(name: str) -> None:
    config, _ = compose(list(RECOVERIES[name]))
    refused = refused_devices(config)
    assert refused["cpu"] == "" and refused["cuda"].startswith("training.device=cuda: must be cpu with ")
    assert refused_devices(on_device(config, "cpu")) == {"cpu": ""}
    with pytest.raises(ConfigError):
        validate(on_device(config, "cuda"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["recovery.max_restarts=1"],
        ["recovery.max_restarts=1", "recovery.keep_layout=true", "nodes.num_spare_nodes=1"],
        ["recovery.max_restarts=1", "recovery.keep_layout=true", "nodes.restart_lost_nodes=true"],
    ],
    ids=" ".join,
)
def test_a_job_that_restarts_its_ranks_is_accepted_on_both(overrides: list[str]) -> None:
    config, _ = compose([*WINDOWS, *overrides])
    assert refused_devices(config) == {"cpu": "", "cuda": ""}
    assert on_device(config, "cpu").keeps_processes and not on_device(config, "cuda").keeps_processes


def test_processes_are_not_kept_on_cuda() -> None:
    kept = ["recovery.keep_layout=true", "nodes.num_spare_nodes=1", "recovery.max_restarts=1"]
    refused = refused_devices(compose([*WINDOWS, *kept, "recovery.keep_processes=true"])[0])
    assert refused["cpu"] == ""
    assert refused["cuda"].startswith("recovery.keep_processes=true: must be false or null with recovery.keep_layout")
    refused = refused_devices(compose([*WINDOWS, *kept, "recovery.max_restarts=0"])[0])
    assert refused["cpu"] == ""
    assert refused["cuda"].startswith("recovery.max_restarts=0: must be above 0 with recovery.keep_layout=true")


def test_what_needs_cuda_is_refused_for_cpu() -> None:
    config, _ = compose(["model.add_bias_linear=true"])
    refused = refused_devices(config)
    assert refused["cuda"] == "" and "model.add_bias_linear" in refused["cpu"]

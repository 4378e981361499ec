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
    "keep_layout with a spare": (*WINDOWS, "recovery.keep_layout=true", "nodes.num_spare_nodes=1"),
    "keep_layout with restarts": (*WINDOWS, "recovery.keep_layout=true", "nodes.restart_lost_nodes=true"),
}


@pytest.mark.parametrize("name", RECOVERIES)
def test_recoveries_that_ranks_on_cuda_refuse_are_refused_for_cuda(name: str) -> None:
    config, _ = compose(list(RECOVERIES[name]))
    refused = refused_devices(config)
    assert refused["cpu"] == "" and refused["cuda"].startswith("training.device=cuda: must be cpu with ")
    assert refused_devices(on_device(config, "cpu")) == {"cpu": ""}
    with pytest.raises(ConfigError):
        validate(on_device(config, "cuda"))


def test_a_job_without_them_is_accepted_on_both() -> None:
    config, _ = compose([*WINDOWS, "recovery.max_restarts=1"])
    assert refused_devices(config) == {"cpu": "", "cuda": ""}


def test_what_needs_cuda_is_refused_for_cpu() -> None:
    config, _ = compose(["model.multi_latent_attention=true"])
    refused = refused_devices(config)
    assert refused["cuda"] == "" and "model.multi_latent_attention" in refused["cpu"]

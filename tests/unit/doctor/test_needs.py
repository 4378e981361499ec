"""Tests that the needs of a job follow from its configuration alone, without the machine."""

from pathlib import Path

import pytest

from megatron_ft.doctor.needs import JobNeeds
from megatron_ft.errors import ConfigError
from pretrain_moe import compose, resolve_plan


def needs(*overrides: str, nodes_here: int | None = None) -> JobNeeds:
    config, _ = compose(list(overrides))
    return JobNeeds.of(config, resolve_plan(config), nodes_here=nodes_here)


def test_a_local_job_has_all_its_nodes_here() -> None:
    assert (needs("launch.num_nodes=3").nodes_here, needs("launch.num_nodes=3", nodes_here=1).nodes_here) == (3, 1)
    assert needs("launch=torchrun", "launch.num_nodes=3", "training.global_batch_size=12").nodes_here == 1
    for number in (0, 4):
        with pytest.raises(ConfigError, match=f"--nodes-here={number}: must be from 1 to 3"):
            needs("launch.num_nodes=3", nodes_here=number)


@pytest.mark.parametrize(("launcher", "is_batch_job"), [("local", False), ("srun", True), ("none", True)])
def test_the_interface_is_of_the_host_of_a_batch_job(launcher: str, is_batch_job: bool) -> None:
    job = needs("run.name=first", f"launch.node_launcher={launcher}", "run.resume=auto", "control.interface=ib0")
    assert job.is_batch_job is is_batch_job


def test_spares_count_as_nodes_and_not_as_peers() -> None:
    job = needs(
        "launch.num_nodes=2",
        "launch.ranks_per_node=2",
        "nodes.num_spare_nodes=1",
        "recovery.keep_layout=true",
        "snapshot=sparse_window",
        "snapshot.num_peer_copies=1",
    )
    assert (job.num_nodes, job.nodes_here, job.ranks_here, job.world_size) == (3, 3, 6, 4)


def test_windows_take_memory_and_files() -> None:
    without, alone = needs("launch.num_nodes=2"), "snapshot.num_peer_copies=0"
    assert (without.snapshot_server_bytes, without.largest_file_bytes, without.persisted_bytes) == (0, 0, 0)
    own = needs("launch.num_nodes=2", "snapshot=sparse_window", alone)
    copied = needs("launch.num_nodes=2", "snapshot=sparse_window", "snapshot.num_peer_copies=1")
    assert 0 < own.largest_file_bytes <= own.snapshot_server_bytes < copied.snapshot_server_bytes
    assert own.host_bytes == without.host_bytes + own.snapshot_server_bytes
    stored = needs("launch.num_nodes=2", "snapshot=sparse_window", alone, "snapshot.persist_interval_windows=1")
    window_bytes = stored.largest_file_bytes // 3
    assert stored.persisted_bytes >= 3 * window_bytes, "two are kept while one is written"


def test_checkpoints_that_lie_there_at_once(tmp_path: Path) -> None:
    assert needs("checkpoint.save_at_end=false").num_checkpoints == 0
    assert needs().num_checkpoints == 1
    assert needs("checkpoint.save_interval_iterations=5", "checkpoint.keep_last=3").num_checkpoints == 4
    sharded = needs("parallel.use_distributed_optimizer=true", f"run.dir={tmp_path}")
    whole = needs("parallel.use_distributed_optimizer=false")
    assert sharded.checkpoint_bytes * 12 == whole.checkpoint_bytes * 16, "fp32: a master of its own is written"
    assert sharded.run_dir == str(tmp_path)


def test_who_asked_for_the_device() -> None:
    named = needs("training.device=cpu")
    assert (named.device, named.device_reason, named.other_device) == ("cpu", "training.device=cpu", "")
    assert needs("limits.gpu_memory_bytes=80000000000").device == "cuda"
    assert needs("training.device=cuda", "training.transformer_impl=transformer_engine").uses_transformer_engine
    assert not needs().uses_transformer_engine

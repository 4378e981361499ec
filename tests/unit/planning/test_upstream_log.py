"""Compares the bytes of the upstream log with values computed by hand."""

import json
from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import ConfigError
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.planning.upstream_log import (
    UpstreamLogReport,
    _iteration_log_bytes,
    _node_log_bytes,
    _tensor_bytes,
    iterations_kept,
    largest_node_bytes,
    largest_rank_bytes,
    log_bytes,
    num_entries,
    pipeline_shape,
    tensor_shape,
)


def job(num_nodes: int = 1, ranks_per_node: int = 1, **groups: dict[str, object]) -> JobConfig:
    """Return a job with sequences of 16, hidden size 32 and 12 samples per iteration."""
    model = {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
    training = {"global_batch_size": 12, "micro_batch_size": 2, **groups.pop("training", {})}
    launch = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node}
    return from_dict({"model": model, "training": training, "launch": launch, **groups})


def pipeline(pp: int, vpp: int | None = None, **sizes: int) -> dict[str, object]:
    return {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vpp, **sizes}


@pytest.mark.parametrize(
    ("window", "lag", "expected"),
    [(1, 0, 2), (3, 2, 10), (10, 1, 22)],
)
def test_two_windows_and_twice_the_lag_are_kept(window: int, lag: int, expected: int) -> None:
    assert iterations_kept(window, lag) == expected


def test_windows_with_a_pause_between_them_are_kept_with_the_pause() -> None:
    """A dense snapshot is captured after iterations 10 and 20. The first is used until the second is committed 2
    iterations later, so a replay may need iterations 11 to 22. The rest of the space is for a capture after a recovery.

    What iterations 11 to 22 have sent may be needed by then; the rest is room for a capture after a recovery.
    """
    assert iterations_kept(1, 2, 10) == 15
    assert iterations_kept(5, 2, 5) == iterations_kept(5, 2)


@pytest.mark.parametrize(("window", "lag", "interval"), [(0, 0, None), (3, -1, None), (3, 1, 2)])
def test_windows_and_lags_that_cannot_be_are_refused(window: int, lag: int, interval: int | None) -> None:
    with pytest.raises(AssertionError):
        iterations_kept(window, lag, interval)


@pytest.mark.parametrize(
    ("parallel", "ranks", "dtype", "shape", "num_bytes"),
    [
        (pipeline(2), 2, "fp32", (16, 2, 32), 4096),
        (pipeline(2), 2, "bf16", (16, 2, 32), 2048),
        (pipeline(2), 2, "fp16", (16, 2, 32), 2048),
        (pipeline(2, tensor_model_parallel_size=2), 4, "fp32", (8, 2, 32), 2048),
        (pipeline(2, context_parallel_size=2), 4, "fp32", (8, 2, 32), 2048),
        (pipeline(2, tensor_model_parallel_size=2, context_parallel_size=4), 16, "bf16", (2, 2, 32), 256),
    ],
)
def test_a_tensor_is_what_megatron_sends(
    parallel: dict[str, object], ranks: int, dtype: str, shape: tuple[int, int, int], num_bytes: int
) -> None:
    config = job(ranks_per_node=ranks, parallel=parallel, precision={"params_dtype": dtype})
    assert (tensor_shape(config), _tensor_bytes(config)) == (shape, num_bytes)


def test_inner_stages_send_both_ways() -> None:
    """6 microbatches pass 4 stages. The first and last stage send 6 tensors of 4096 bytes each, the stages between them
    12."""
    config = job(ranks_per_node=4, parallel=pipeline(4))
    assert [_iteration_log_bytes(config, stage) for stage in range(4)] == [24_576, 49_152, 49_152, 24_576]
    assert [log_bytes(config, stage, 7) for stage in (0, 1)] == [7 * 24_576, 7 * 49_152]


def test_interleaved_stages_send_for_each_chunk() -> None:
    """Two stages of two chunks send 6 * 2 tensors in one direction, and 6 fewer in the other, because the model
    ends."""
    config = job(ranks_per_node=2, parallel=pipeline(2, 2))
    assert [num_entries(config, stage) for stage in (0, 1)] == [12 + 6, 6 + 12]


def test_padding_microbatches_are_logged_too() -> None:
    """5 microbatches on two ranks are 3 each. Interleaved over two stages, the schedule needs 4."""
    config = job(ranks_per_node=4, parallel=pipeline(2), training={"global_batch_size": 10})
    assert (pipeline_shape(config).num_microbatches, num_entries(config, 0)) == (3, 3)
    config = job(ranks_per_node=4, parallel=pipeline(2, 2), training={"global_batch_size": 10})
    assert (pipeline_shape(config).num_microbatches, num_entries(config, 0)) == (4, 8 + 4)


def test_one_stage_logs_nothing() -> None:
    config = job(ranks_per_node=2)
    assert log_bytes(config, 0, 9) == _node_log_bytes(config, 0, 9) == 0


def test_a_node_keeps_the_logs_of_its_ranks() -> None:
    """Three stages of two ranks are on two nodes: node 0 has stage 0 and half of stage 1. Each rank has 3
    microbatches."""
    config = job(num_nodes=2, ranks_per_node=3, parallel=pipeline(3))
    stages = [3 * 4096, 6 * 4096, 3 * 4096]
    assert _node_log_bytes(config, 0, 5) == 5 * (2 * stages[0] + stages[1])
    assert _node_log_bytes(config, 1, 5) == 5 * (stages[1] + 2 * stages[2])
    assert largest_node_bytes(config, 5) == _node_log_bytes(config, 0, 5) == _node_log_bytes(config, 1, 5)
    assert largest_rank_bytes(config, 5) == 5 * stages[1]


def kept_job(pp: int = 3, **groups: dict[str, Any]) -> JobConfig:
    """Return a job with two nodes of three ranks that keeps its layout, with a dense snapshot every 10 iterations."""
    target = "megatron_ft.planning.snapshot.dense.DenseInterval"
    known = {"bandwidth_bytes_per_second": 1e9, "iteration_seconds": 1.0, "num_peer_copies": 1}
    snapshot = {"policy": {"_target_": target, "interval_iterations": 10}, **known, **groups.pop("snapshot", {})}
    recovery = {"keep_layout": True, **groups.pop("recovery", {})}
    return job(
        2, 3, parallel=pipeline(pp), recovery=recovery, nodes={"num_spare_nodes": 1}, snapshot=snapshot, **groups
    )


def reported(config: JobConfig) -> tuple[UpstreamLogReport | None, SnapshotReport | None]:
    snapshot = SnapshotReport.of(config, 257)
    return UpstreamLogReport.of(config, snapshot), snapshot


def test_the_report_states_memory_by_stage_and_by_node() -> None:
    """3 microbatches are sent in each direction, for 10 + 1 + 2 * 4 iterations."""
    report, _ = reported(kept_job())
    assert report is not None and report.iterations_kept == 19
    assert (report.num_entries, report.iteration_bytes) == ((3, 6, 3), (12_288, 24_576, 12_288))
    assert report.rank_bytes == (19 * 12_288, 19 * 24_576, 19 * 12_288)
    assert report.node_bytes == (19 * 49_152, 19 * 49_152) and report.host_bytes == 19 * 49_152
    assert json.loads(json.dumps(report.to_json()))["host_bytes"] == report.host_bytes


def test_what_hangs_on_windows_is_open_while_they_are_measured() -> None:
    report, _ = reported(kept_job(snapshot={"iteration_seconds": None}))
    assert report is not None and report.iteration_bytes == (12_288, 24_576, 12_288)
    assert report.iterations_kept is report.rank_bytes is report.node_bytes is None
    assert report.host_bytes == 0


def test_nothing_is_reported_where_nothing_is_sent_or_no_layout_is_kept() -> None:
    assert reported(kept_job(pp=1))[0] is None
    assert reported(kept_job(recovery={"keep_layout": False}))[0] is None


def test_a_node_over_the_limit_is_refused_with_the_bytes_needed() -> None:
    needed = 19 * 49_152
    assert reported(kept_job(upstream_log={"memory_limit_bytes": needed}))[0] is not None
    message = rf"^upstream_log\.memory_limit_bytes={needed - 1}: must be at least {needed} \("
    with pytest.raises(ConfigError, match=message):
        reported(kept_job(upstream_log={"memory_limit_bytes": needed - 1}))

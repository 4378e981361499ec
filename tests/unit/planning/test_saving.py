"""Compares the memory of a save with values computed by hand. ``tests/distributed/test_saving_memory.py`` measures a
real save."""

import pytest

from megatron_ft.errors import ConfigError
from tests.unit.planning.test_job import plan


def test_every_data_parallel_rank_holds_the_whole_optimizer_during_a_save() -> None:
    saving = plan(launch={"ranks_per_node": 4}).stages[0].saving
    num_parameters = plan().num_parameters
    assert saving.gathered_bytes == 12 * num_parameters
    assert saving.gathering_bytes == pytest.approx((12 + 12 / 4 + 12) * num_parameters, rel=1e-4)
    assert saving.snapshot_bytes == pytest.approx(16 * num_parameters / 4, rel=1e-4)


def test_experts_are_gathered_after_the_rest() -> None:
    stage = plan(parallel={"expert_model_parallel_size": 2}, launch={"ranks_per_node": 4}).stages[0]
    dense, expert = stage.parameters.num_dense, stage.parameters.num_expert
    after_dense, after_all = dense * (12 + 12 / 4 + 12), 12 * dense + expert * (12 + 12 / 2 + 12)
    assert stage.saving.gathering_bytes == pytest.approx(max(after_dense, after_all), rel=1e-4)


def test_without_distributed_optimizer_nothing_is_gathered() -> None:
    stage = plan(parallel={"use_distributed_optimizer": False}, launch={"ranks_per_node": 2}).stages[0]
    assert (stage.saving.gathered_bytes, stage.saving.gathering_bytes) == (0, 0)
    assert stage.saving.snapshot_bytes == pytest.approx(12 * stage.parameters.total / 2, rel=1e-4)


def test_one_writer_copies_everything() -> None:
    spread = plan(launch={"ranks_per_node": 2}).stages[0].saving
    alone = plan(launch={"ranks_per_node": 2}, checkpoint={"fully_parallel": False}).stages[0].saving
    assert alone.snapshot_bytes == pytest.approx(2 * spread.snapshot_bytes, rel=1e-4)


def test_a_device_holds_a_bucket_and_the_host_its_copy() -> None:
    stage = plan("cuda", launch={"ranks_per_node": 2}).stages[0]
    assert stage.saving.device_bytes == pytest.approx((8 + 4 / 2) * stage.parameters.total, rel=1e-4)
    assert stage.device_bytes >= stage.memory.state_bytes + stage.saving.device_bytes
    assert plan(launch={"ranks_per_node": 2}).stages[0].saving.device_bytes == 0


def test_a_limit_that_training_fits_but_no_save_is_refused() -> None:
    model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 16}
    groups = {"model": model, "launch": {"ranks_per_node": 2}, "training": {"micro_batch_size": 1}}
    planned = plan(**groups)
    while_training = 2 * (450_000_000 + planned.stages[0].memory.total_bytes)
    assert planned.host_bytes_per_node > while_training
    with pytest.raises(ConfigError, match=r"limits\.host_memory_bytes=\d+: must be at least \d+"):
        plan(**groups, limits={"host_memory_bytes": while_training})


def test_background_writing_keeps_its_copy_beside_activations() -> None:
    training = {"micro_batch_size": 64, "global_batch_size": 64}
    both = [plan(training=training, checkpoint={"async_save": later}) for later in (True, False)]
    difference = both[0].host_bytes_per_node - both[1].host_bytes_per_node
    assert difference == both[0].stages[0].saving.snapshot_bytes

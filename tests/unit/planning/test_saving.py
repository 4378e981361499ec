"""Compares the memory of a save with values computed by hand. ``tests/distributed/test_saving_memory.py`` measures a
real save."""

import pytest

from megatron_ft.errors import ConfigError
from tests.unit.planning.test_job import plan


def test_data_parallel_ranks_divide_all_state() -> None:
    stage = plan(launch={"ranks_per_node": 4}).stages[0]
    assert stage.saving_bytes == pytest.approx(16 * plan().num_parameters / 4, rel=1e-4)


def test_experts_are_divided_over_the_ranks_that_have_them() -> None:
    stage = plan(parallel={"expert_model_parallel_size": 2}, launch={"ranks_per_node": 4}).stages[0]
    dense, expert = stage.parameters.num_dense, stage.parameters.num_expert
    assert stage.saving_bytes == pytest.approx(16 * (dense / 4 + expert / 2), rel=1e-4)


def test_weights_of_fp32_are_their_own_masters_without_a_sharded_optimizer() -> None:
    stage = plan(parallel={"use_distributed_optimizer": False}, launch={"ranks_per_node": 2}).stages[0]
    assert stage.saving_bytes == pytest.approx(12 * stage.parameters.total / 2, rel=1e-4)


def test_one_writer_copies_all_weights() -> None:
    stage = plan(launch={"ranks_per_node": 2}, checkpoint={"fully_parallel": False}).stages[0]
    assert stage.saving_bytes == pytest.approx((4 + 12 / 2) * stage.parameters.total, rel=1e-4)
    whole = {"use_distributed_optimizer": False}
    stage = plan(launch={"ranks_per_node": 2}, parallel=whole, checkpoint={"fully_parallel": False}).stages[0]
    assert stage.saving_bytes == 12 * stage.parameters.total


def test_a_limit_that_training_fits_but_no_save_is_refused() -> None:
    model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 16}
    groups = {"model": model, "launch": {"ranks_per_node": 2}, "training": {"micro_batch_size": 1}}
    planned = plan(**groups)
    while_training = 2 * (450_000_000 + planned.stages[0].memory.total_bytes)
    assert planned.host_bytes_per_node > while_training
    with pytest.raises(ConfigError, match=r"limits\.host_memory_bytes=\d+: must be at least \d+"):
        plan(**groups, limits={"host_memory_bytes": while_training})


@pytest.mark.parametrize("later", [True, False])
def test_the_copy_of_a_save_is_kept_beside_activations(later: bool) -> None:
    training = {"micro_batch_size": 64, "global_batch_size": 64}
    planned = plan(training=training, checkpoint={"async_save": later})
    stage = planned.stages[0]
    assert planned.host_bytes_per_node == 450_000_000 + stage.memory.total_bytes + stage.saving_bytes

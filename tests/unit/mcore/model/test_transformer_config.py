"""Tests the pipeline settings in Megatron's configuration for any configuration of a job."""

from typing import Any

import pytest

from megatron_ft.mcore.model.transformer_config import build_transformer_config
from megatron_ft.testing.engines import micro_config

PP2: dict[str, Any] = {"model.num_layers": 4, "parallel.pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "parallel.virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize("overrides", [PP2, VPP2])
def test_stages_neither_wait_for_the_device_nor_keep_what_they_have_sent(overrides: dict[str, Any]) -> None:
    config = build_transformer_config(micro_config(overrides, world_size=2), "local")
    assert not config.batch_p2p_sync
    assert config.deallocate_pipeline_outputs

"""Tests Transformer Engine's layers on one GPU: the numbers of the local layers, and weights that do not depend on the
layout."""

from typing import Any

import pytest

from megatron_ft.errors import SoftwareError
from megatron_ft.mcore.device.install import _Software
from tools.gpu import ranks
from tools.gpu.training import MODEL
from tools.gpu.transports import TRANSPORTS

pytestmark = pytest.mark.timeout(600)
SECONDS = 280.0
ENGINE = {**MODEL, "training.transformer_impl": "transformer_engine", "precision.params_dtype": "bf16"}
LATENT = {
    "model.multi_latent_attention": True,
    "model.q_lora_rank": 16,
    "model.kv_lora_rank": 16,
    "model.qk_head_dim": 16,
    "model.qk_pos_emb_head_dim": 16,
    "model.v_head_dim": 16,
}
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "plain again": (1, {}),
    "grouped queries": (1, {"model.num_query_groups": 2}),
    "latent attention": (1, LATENT),
    "latent attention, TP=2": (2, {**LATENT, "parallel.tensor_model_parallel_size": 2}),
    "EP=2": (2, {"parallel.expert_model_parallel_size": 2}),
}
"""Number of ranks and overrides of each configuration, by name."""
TOLERANCE = 2e-2
"""Relative tolerance of bf16 compared with fp32, over all iterations."""


@pytest.fixture(scope="module", autouse=True)
def _has_transformer_engine() -> None:
    try:
        version = _Software.inspect().transformer_engine
    except SoftwareError as error:
        pytest.skip(str(error))
    if version is None:
        pytest.skip("needs a complete transformer_engine>=2.9,<2.12")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    jobs = {
        name: {
            "config": ranks.config_for("cuda", {**ENGINE, **overrides}, world_size=world_size),
            "world_size": world_size,
            "environments": TRANSPORTS[0].environments(world_size),
        }
        for name, (world_size, overrides) in JOBS.items()
    }
    return ranks.run_apart(jobs, folder=tmp_path_factory.mktemp("te"), seconds=SECONDS, sees_gpu=True)


def test_it_runs_the_layers(trained: dict[str, list[dict[str, Any]]]) -> None:
    kinds = {result["transformer_impl"] for results in trained.values() for result in results}
    assert kinds == {"transformer_engine"}


@pytest.mark.parametrize("name", ["plain", "grouped queries", "EP=2"])
def test_it_has_the_numbers_of_the_local_layers_on_the_cpu(
    name: str, trained: dict[str, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    overrides = {} if name == "EP=2" else JOBS[name][1]
    reference = {name: {"config": ranks.config_for("cpu", {**MODEL, **overrides}), "world_size": 1}}
    expected = ranks.run_apart(reference, folder=tmp_path_factory.mktemp("cpu"), seconds=SECONDS)[name][0]
    assert trained[name][0]["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)


def test_the_same_bits_again(trained: dict[str, list[dict[str, Any]]]) -> None:
    assert ranks.bits(trained["plain"][0]) == ranks.bits(trained["plain again"][0])


def test_weights_that_tensor_parallel_ranks_share_are_those_of_one_rank(
    trained: dict[str, list[dict[str, Any]]],
) -> None:
    """With latent attention, two projections are duplicated over tensor-parallel ranks. If their weights differed, the
    first loss would differ."""
    two, one = trained["latent attention, TP=2"], trained["latent attention"][0]
    assert two[0]["losses"] == two[1]["losses"]
    assert two[0]["losses"][0] == pytest.approx(one["losses"][0], rel=1e-3)
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=TOLERANCE)

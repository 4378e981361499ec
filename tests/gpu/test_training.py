"""Tests a short run of one rank on a GPU: the numbers of the CPU in every variant of the model, and the same bits
twice."""

from typing import Any

import pytest

from tools.gpu import ranks
from tools.gpu.training import MODEL, VARIANTS, fp32

pytestmark = pytest.mark.timeout(600)
DEVICE_TYPE = "cuda"
SECONDS = 280.0
Results = dict[str, list[dict[str, Any]]]


def jobs(device_type: str) -> dict[str, Any]:
    """Return a job with one rank for each variant. The jobs on the CPU are in fp32."""
    wanted = {name: overrides if device_type != "cpu" else fp32(overrides) for name, (overrides, _) in VARIANTS.items()}
    return {
        name: {"config": ranks.config_for(device_type, {**MODEL, **overrides}), "world_size": 1}
        for name, overrides in wanted.items()
    }


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ranks.run_apart(jobs("cpu"), folder=tmp_path_factory.mktemp("cpu"), seconds=SECONDS)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Return the results of two runs on the GPU."""
    first, again = (
        ranks.run_apart(jobs(DEVICE_TYPE), folder=tmp_path_factory.mktemp(name), seconds=SECONDS, sees_gpu=True)
        for name in ("first", "again")
    )
    return first, again


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_has_the_numbers_of_the_cpu(variant: str, on_cpu: Results, on_gpu: tuple[Results, Results]) -> None:
    (result,), (expected,) = on_gpu[0][variant], on_cpu[variant]
    assert result["device"] == DEVICE_TYPE
    assert ranks.difference(result, expected) <= VARIANTS[variant][1]
    assert result["evaluation"] == pytest.approx(expected["evaluation"], rel=VARIANTS[variant][1])
    assert [sum(layer) for layer in result["load"]] == [sum(layer) for layer in expected["load"]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_deterministic_runs_repeat_to_the_bit(variant: str, on_gpu: tuple[Results, Results]) -> None:
    first, again = (ranks.bits(results[variant][0]) for results in on_gpu)
    assert first == again

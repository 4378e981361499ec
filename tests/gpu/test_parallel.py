"""Tests layouts over several ranks on one GPU with NCCL: the numbers of one rank on the CPU, and the same bits
twice."""

from typing import Any

import pytest

from tools.gpu import ranks
from tools.gpu.layouts import FIRST_TOLERANCE, LAYOUTS, TOLERANCE
from tools.gpu.training import MODEL
from tools.gpu.transports import TRANSPORTS

pytestmark = pytest.mark.timeout(600)
DEVICE_TYPE = "cuda"
TRANSPORT = TRANSPORTS[0]
SECONDS = 280.0
Results = dict[str, list[dict[str, Any]]]


def job(world_size: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """Return the job of a layout."""
    config = ranks.config_for(DEVICE_TYPE, {**MODEL, **parallel}, world_size=world_size)
    return {"config": config, "world_size": world_size, "environments": TRANSPORT.environments(world_size)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reference = {"one": {"config": ranks.config_for("cpu", MODEL), "world_size": 1}}
    return ranks.run_apart(reference, folder=tmp_path_factory.mktemp("cpu"), seconds=SECONDS)["one"][0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Return the results of the ranks of every layout, from two runs."""
    jobs = {name: job(*layout) for name, layout in LAYOUTS.items()}
    first, again = (
        ranks.run_apart(jobs, folder=tmp_path_factory.mktemp(name), seconds=SECONDS, sees_gpu=True)
        for name in ("first", "again")
    )
    return first, again


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_numbers_of_one_rank(
    layout: str, trained: tuple[Results, Results], expected: dict[str, Any]
) -> None:
    first = trained[0][layout][0]
    assert first["device"] == DEVICE_TYPE
    assert first["losses"][0] == pytest.approx(expected["losses"][0], rel=FIRST_TOLERANCE)
    assert ranks.difference(first, expected) <= TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_same_bits_again(layout: str, trained: tuple[Results, Results]) -> None:
    first, again = ([ranks.bits(result) for result in run[layout]] for run in trained)
    assert first == again


def test_all_ranks_of_a_layout_vote_alike(trained: tuple[Results, Results]) -> None:
    for name, results in trained[0].items():
        assert {tuple(result["losses"]) for result in results} == {tuple(results[0]["losses"])}, name

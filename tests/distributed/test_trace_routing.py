"""Tests routing by recorded loads over several gloo ranks: every layout routes every token of the global batch in the
same way."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.planning.trace import expert_token_counts
from megatron_ft.testing.engines import of_ranks, run_scenarios

LOADS = [[9, 4, 2, 1], [1, 1, 1, 3]]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp3": (3, {}),
    "tp2": (2, {"parallel.tensor_model_parallel_size": 2}),
    "pp2_recompute": (2, {"parallel.pipeline_model_parallel_size": 2, "training.recompute_granularity": "full"}),
    "ep2": (2, {"parallel.expert_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    path = tmp_path_factory.mktemp("trace") / "loads.json"
    path.write_text(json.dumps(LOADS))
    return run_scenarios({name: _scenario(world, layout, path) for name, (world, layout) in LAYOUTS.items()})


def _scenario(world_size: int, layout: dict[str, Any], path: Path) -> tuple[str, int, dict[str, Any]]:
    forced = {"model.router": "trace", "model.router_trace_file": str(path)}
    return "tests.helpers.engine_scenarios:train", world_size, {"overrides": {**forced, **layout}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_routes_alike(outcomes: dict[str, list[Any]], layout: str) -> None:
    """Losses, norms and evaluation equal those of one rank. Another assignment of tokens would change them."""
    expected, ranks = of_ranks(outcomes, "one")[0], of_ranks(outcomes, layout)
    assert ranks == [ranks[0]] * len(ranks)
    for key in ("losses", "grad_norms", "aux_losses"):
        assert ranks[0][key] == pytest.approx(expected[key], rel=2e-6, abs=1e-6), key
    assert ranks[0]["evaluation"] == pytest.approx(expected["evaluation"], rel=2e-6)
    per_microbatch = [expert_token_counts(loads, 16, 2) for loads in LOADS]
    assert ranks[0]["load"] == [[4 * count for count in counts] for counts in per_microbatch], "of the last iteration"

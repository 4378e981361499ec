"""Tests routing by recorded loads over several gloo ranks: every layout routes every token of the global batch in the
same way, and a rank whose experts get no tokens takes part in all exchanges."""

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
LONE = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
"""Loads of four layers. In two of them, the rank with the last two experts gets no tokens."""
BF16 = {"precision.params_dtype": "bf16"}
TENSORWISE = {**BF16, "precision.fp8": "hybrid", "precision.fp8_recipe": "tensorwise"}
BLOCKWISE = {**TENSORWISE, "precision.fp8_recipe": "blockwise"}
FOUR = {"model.num_layers": 4, "model.moe_aux_loss_coeff": 0.01, "parallel.expert_model_parallel_size": 2}
TP2 = {"parallel.tensor_model_parallel_size": 2}
PP2 = {"parallel.pipeline_model_parallel_size": 2}
TOP1 = {"model.moe_router_topk": 1, "model.moe_router_pre_softmax": True}
REPLICAS = {"placement.num_slots_per_rank": 2, "parallel.expert_model_parallel_size": 1}
WITHOUT_TOKENS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (2, {"overrides": {**FOUR, **BF16}}),
    "bf16_tp2": (4, {"overrides": {**FOUR, **BF16, **TP2}}),
    "fp8_tensorwise": (2, {"overrides": {**FOUR, **TENSORWISE}}),
    "fp8_blockwise": (2, {"overrides": {**FOUR, **BLOCKWISE}}),
    "fp8_regime": (2, {"overrides": {**FOUR, **BLOCKWISE, "precision.regime": "fp8_fp8_fp8_fp16"}}),
    "fp8_recompute": (2, {"overrides": {**FOUR, **TENSORWISE, "training.recompute_granularity": "full"}}),
    "fp8_pp2": (4, {"overrides": {**FOUR, **TENSORWISE, **PP2}}),
    "fp8_overlap": (4, {"overrides": {**FOUR, **BLOCKWISE, "parallel.overlap_grad_reduce": True}}),
    "fp8_replicas": (2, {"overrides": {**FOUR, **TENSORWISE, **TOP1, **REPLICAS}, "replicas": True}),
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


@pytest.fixture(scope="module")
def without_tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    path = tmp_path_factory.mktemp("trace") / "loads.json"
    found = {}
    for name, (world_size, arguments) in WITHOUT_TOKENS.items():
        # One expert for each token, for replicas: then only one rank gets tokens, whichever has the expert.
        loads = [layer if arguments["overrides"].get("model.moe_router_topk") != 1 else [1, 0, 0, 0] for layer in LONE]
        file = path.with_name(f"{name}.json")
        file.write_text(json.dumps(loads))
        forced = {"model.router": "trace", "model.router_trace_file": str(file)}
        arguments = {**arguments, "overrides": {**forced, **arguments["overrides"]}}
        found[name] = ("tests.helpers.replica_scenarios:order_of_exchanges", world_size, arguments)
    return run_scenarios(found)


@pytest.mark.parametrize("name", WITHOUT_TOKENS)
def test_a_rank_without_tokens_takes_part_in_all_exchanges(without_tokens: dict[str, list[Any]], name: str) -> None:
    """All ranks of an expert group have the same all-to-alls in the same order in the backward pass. Otherwise ranks
    would wait for each other, or would send rows to another layer."""
    ranks = of_ranks(without_tokens, name)
    assert min(rank["fewest_rows"] for rank in ranks) == 0
    for rank in ranks:
        assert len(rank["group"]) == 2 and rank["of_backward"]
        assert rank["of_backward"] == ranks[rank["group"][0]]["of_backward"]
        assert rank["losses"] == ranks[0]["losses"]

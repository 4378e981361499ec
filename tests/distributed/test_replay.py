"""Tests that a replayed window gives the same bits after all state was lost.

Every scenario trains and captures a window in random order. It then builds a second engine whose weights, masters,
moments, step counts, buffers and random numbers are scrambled, restores and replays the window, and compares everything
in every iteration with the undisturbed run. No bit may differ.
"""

from typing import Any

import pytest

from megatron_ft.testing.engines import of_ranks, run_scenarios
from tests.helpers.sharing import chosen, runs_extended

REPLAY = "tests.helpers.replay_scenarios:replay"
LIMIT_SECONDS = 400.0

pytestmark = pytest.mark.timeout(int(LIMIT_SECONDS))

BF16 = {"precision.params_dtype": "bf16"}
FP16 = {
    "precision.params_dtype": "fp16",
    "precision.initial_loss_scale": 64.0,
    "precision.loss_scale_window": 1,
    "precision.hysteresis": 1,
}
FP32 = {"precision.params_dtype": "fp32"}
FP8 = {**BF16, "precision.fp8": "hybrid"}
TENSORWISE = {**FP8, "precision.fp8_recipe": "tensorwise"}
BLOCKWISE = {**FP8, "precision.fp8_recipe": "blockwise"}
DELAYED = {**FP8, "precision.fp8_recipe": "delayed", "precision.fp8_amax_history_length": 3}
FP16_STATE = {**FP16, "precision.regime": "fp16_fp16_fp16_fp16"}
FP32_STATE = {**BLOCKWISE, "precision.regime": "fp8_fp32_fp32_fp32"}
FP16_MASTERS = {**BLOCKWISE, "precision.regime": "fp8_fp16_fp32_fp32"}
FP8_MOMENTS = {**TENSORWISE, "precision.regime": "fp8_fp16_fp8_fp16"}
FP8_MASTERS = {**BLOCKWISE, "precision.regime": "fp8_fp8_fp8_fp16"}
PLAIN = {"parallel.use_distributed_optimizer": False}
TP2 = {"parallel.tensor_model_parallel_size": 2}
PP2 = {"parallel.pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "parallel.virtual_pipeline_model_parallel_size": 2, "model.num_layers": 4}
EP2 = {"parallel.expert_model_parallel_size": 2}
OVERLAP = {"parallel.overlap_grad_reduce": True}
TIED = {"model.untie_embeddings_and_output_weights": False}
BIASED = {"model.moe_router_score_function": "sigmoid", "model.moe_router_enable_expert_bias": True}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
RECOMPUTE = {"training.recompute_granularity": "full"}
SKIP = {"training.non_finite_policy": "skip", "training.max_consecutive_skips": 3}
DENSE = {"model.num_moe_experts": None, "model.moe_ffn_hidden_size": None}
BIASES = {
    "model.add_bias_linear": True,
    "model.add_qkv_bias": True,
    "model.qk_layernorm": True,
    "model.normalization": "LayerNorm",
    "model.position_embedding_type": "learned_absolute",
}
GLOBAL = {"model.moe_router_load_balancing_type": "global_aux_loss", "model.moe_aux_loss_coeff": 0.1}
SHARED = {"model.moe_shared_expert_intermediate_size": 64, "model.moe_first_dense_layers": 1, "model.num_layers": 3}
SEARCH = {"placement.algorithm": {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}}
PARTS = {"0.embedding": 5, "3.head": 3, "1.expert.0": 2, "1.non_expert": 7, "2.gate": 3}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"overrides": BF16}),
    "dp2": (2, {"overrides": BF16}),
    "dp2_plain": (2, {"overrides": {**BF16, **PLAIN}}),
    "dp2_overlap": (2, {"overrides": {**BF16, **OVERLAP}}),
    "tp2": (2, {"overrides": {**BF16, **TP2}}),
    "pp2": (2, {"overrides": {**BF16, **PP2}}),
    "vpp2": (2, {"overrides": {**BF16, **VPP2}, "num_slices": 4}),
    "vpp2_dp2_overlap": (4, {"overrides": {**BF16, **VPP2, **OVERLAP}, "num_slices": 4}),
    "ep2": (2, {"overrides": {**BF16, **EP2}}),
    "ep2_pp2": (4, {"overrides": {**BF16, **EP2, **PP2, **DROPOUT}, "num_slices": 4}),
    "ep2_tp2_pp2": (4, {"overrides": {**BF16, **EP2, **TP2, **PP2, **DROPOUT}}),
    "replicas": (3, {"overrides": {**BF16, **BIASED, **SEARCH}, "replicas": True}),
    "replicas_plain": (3, {"overrides": {**FP32, **PLAIN, **SEARCH}, "replicas": True}),
}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (1, {"overrides": {**FP32, **DROPOUT}}),
    "fp32_plain_tp2": (2, {"overrides": {**FP32, **PLAIN, **TP2}}),
    "fp16_overflow": (2, {"overrides": {**FP16, **EP2}, "poisoned": 4}),
    "skipped": (2, {"overrides": {**BF16, **BIASED, **SKIP}, "poisoned": 3}),
    "bias_and_clipping": (2, {"overrides": {**BF16, **BIASED, **DROPOUT, "optimizer.clip_grad": 0.1}}),
    "tied": (1, {"overrides": {**BF16, **TIED}}),
    "tied_tp2": (2, {"overrides": {**BF16, **TIED, **TP2}}),
    "tied_pp2_dp2": (4, {"overrides": {**BF16, **TIED, **PP2}}),
    "parts": (2, {"overrides": BF16, "num_parts": PARTS, "num_slices": 4}),
    "parts_plain": (2, {"overrides": {**BF16, **PLAIN}, "num_parts": PARTS, "num_slices": 4}),
    "dense": (2, {"overrides": {**BF16, **DENSE, **TP2}}),
    "dense_with_biases": (2, {"overrides": {**BF16, **DENSE, **TP2, **BIASES}}),
    "global_aux_loss": (2, {"overrides": {**BF16, **GLOBAL, "precision.grad_reduce_in_fp32": False}}),
    "shared_experts": (1, {"overrides": {**BF16, **SHARED}}),
    "recompute": (2, {"overrides": {**BF16, **RECOMPUTE, **TP2, **EP2, **DROPOUT}}),
    "recompute_pp2": (2, {"overrides": {**BF16, **RECOMPUTE, **PP2}}),
    "fp8_tensorwise": (1, {"overrides": TENSORWISE}),
    "fp8_tensorwise_ep2_pp2": (4, {"overrides": {**TENSORWISE, **EP2, **PP2, **DROPOUT}, "num_slices": 4}),
    "fp8_tensorwise_ep2": (2, {"overrides": {**TENSORWISE, **EP2, "model.num_layers": 4}, "num_slices": 4}),
    "fp8_blockwise_ep2": (2, {"overrides": {**BLOCKWISE, **EP2, "model.num_layers": 4}, "num_slices": 4}),
    "fp8_blockwise_replicas": (3, {"overrides": {**BLOCKWISE, **BIASED, **SEARCH}, "replicas": True}),
    "fp8_blockwise_recompute": (1, {"overrides": {**BLOCKWISE, **SHARED, **RECOMPUTE}}),
    "fp8_delayed_ep2_pp2": (4, {"overrides": {**DELAYED, **EP2, **PP2, **DROPOUT}, "num_slices": 4}),
    "fp8_delayed_replicas": (
        3,
        {"overrides": {**DELAYED, **BIASED, **SEARCH, **SKIP}, "replicas": True, "poisoned": 3},
    ),
    "fp8_delayed_recompute": (1, {"overrides": {**DELAYED, **SHARED, **RECOMPUTE}}),
    "fp16_state": (2, {"overrides": {**FP16_STATE, **TP2, **DROPOUT}, "poisoned": 4}),
    "fp32_state": (2, {"overrides": {**FP32_STATE, **PLAIN}, "num_parts": PARTS, "num_slices": 4}),
    "fp16_masters": (4, {"overrides": {**FP16_MASTERS, **EP2, **PP2, **BIASED}, "num_slices": 4}),
    "fp8_moments": (3, {"overrides": {**FP8_MOMENTS, **PLAIN, **BIASED, **SEARCH}, "replicas": True}),
    "fp8_masters": (3, {"overrides": {**FP8_MASTERS, **SEARCH, "training.global_batch_size": 6}, "replicas": True}),
    "fp8_masters_parts": (2, {"overrides": FP8_MASTERS, "num_parts": PARTS, "num_slices": 4}),
    "computed": (1, {"overrides": BF16, "skip_frozen": False}),
}
EXTENDED = ("dp2", "vpp2", "ep2", "ep2_pp2", "fp32", "tied", "tied_tp2", "parts_plain", "dense", "recompute_pp2")
EXTENDED += ("fp8_tensorwise", "fp8_blockwise_recompute", "one", "tp2", "pp2", "recompute", "replicas_plain")
EXTENDED += ("fp8_blockwise_ep2", "dp2_overlap", "fp32_plain_tp2", "fp8_tensorwise_ep2_pp2", "fp8_blockwise_replicas")
EXTENDED += ("fp32_state", "fp16_masters", "fp8_moments", "fp8_masters_parts", "random_numbers")
EXTENDED += ("fp8_delayed_recompute",)
"""Scenarios and damages whose features another one also has."""
DAMAGES: dict[str, str] = {
    "weight": "the replay of iteration 3 had other results than the iteration itself",
    "random_numbers": "the replay of iteration 3 had other results than the iteration itself: loss=",
    "vote": "the replay of iteration 3 had other results than the iteration itself: loss=",
    "short": "captured bytes, but",
    "no_train_state": "slice 0 has no train state",
}


def _replayed(jobs: dict[str, tuple[int, dict[str, Any]]], request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    wanted = [name for name in jobs if runs_extended(request) or name not in EXTENDED]
    return run_scenarios({name: (REPLAY, *jobs[name]) for name in wanted}, timeout_seconds=LIMIT_SECONDS)


@pytest.fixture(scope="module")
def layouts(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return _replayed(LAYOUTS, request)


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return _replayed(MODELS, request)


@pytest.fixture(scope="module")
def damaged(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    overrides = {**FP32, **DROPOUT}
    wanted = [name for name in DAMAGES if runs_extended(request) or name not in EXTENDED]
    return run_scenarios({name: (REPLAY, 2, {"overrides": overrides, "damage": name}) for name in wanted})


def check(ranks: list[Any], num_slices: int) -> None:
    for rank in ranks:
        assert list(rank["differences"]) == [str(number) for number in range(num_slices + 1, num_slices + 4)]
        assert not any(rank["differences"].values()), rank["differences"]
        assert rank["num_tensors"] > 40
        assert rank["num_iterations"] == num_slices - 1
        assert rank["num_frozen"] == sorted(rank["num_frozen"], reverse=True)
        assert rank["num_frozen"][0] > 0 and rank["num_frozen"][-1] == 0


@pytest.mark.parametrize("name", chosen(LAYOUTS, EXTENDED))
def test_a_replay_ends_with_the_same_bits_in_every_layout(layouts: dict[str, list[Any]], name: str) -> None:
    ranks = of_ranks(layouts, name)
    check(ranks, LAYOUTS[name][1].get("num_slices", 3))
    assert all(rank["tensor_parts"] == ([0, 1] if "tp2" in name else [0]) for rank in ranks)


@pytest.mark.parametrize("name", chosen(MODELS, EXTENDED))
def test_a_replay_ends_with_the_same_bits_for_every_model(models: dict[str, list[Any]], name: str) -> None:
    check(of_ranks(models, name), MODELS[name][1].get("num_slices", 3))


def test_replayed_iterations_were_what_their_scenarios_are_about(models: dict[str, list[Any]]) -> None:
    """Iterations 3 and 4, which are replayed, contain a skip, an overflow and clipping."""
    assert of_ranks(models, "fp16_overflow")[0]["overflows"] == [4]
    assert of_ranks(models, "skipped")[0]["losses"]["3"] == "nan"
    assert {3, 4} <= set(of_ranks(models, "bias_and_clipping")[0]["clipped"])


@pytest.mark.parametrize("damage", chosen(DAMAGES, EXTENDED))
def test_a_replay_that_cannot_be_exact_says_so(damaged: dict[str, list[Any]], damage: str) -> None:
    """All ranks report the error, whichever rank has the wrong state."""
    for rank in of_ranks(damaged, damage):
        assert DAMAGES[damage] in rank["refused"]

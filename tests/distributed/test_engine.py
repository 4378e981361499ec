"""Tests the engine over several gloo ranks: equal numbers in every layout, and equal bits in a second generation."""

import math
from typing import Any

import pytest

from megatron_ft.testing.engines import of_ranks, run_scenarios
from tests.helpers.sharing import chosen, runs_extended

SCENARIOS = "tests.helpers.engine_scenarios"
FOUR_LAYERS = {"model.num_layers": 4}
BIASED = {"model.moe_router_score_function": "sigmoid", "model.moe_router_enable_expert_bias": True}
TIED = {"model.untie_embeddings_and_output_weights": False}
TP2 = {"parallel.tensor_model_parallel_size": 2}
PP2 = {"parallel.pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "parallel.virtual_pipeline_model_parallel_size": 2}
EP2 = {"parallel.expert_model_parallel_size": 2}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp3": (3, {}),
    "dp3_full_recompute": (3, {"training.recompute_granularity": "full"}),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "vpp2": (2, VPP2),
    "ep2": (2, EP2),
    "ep2_plain_optimizer": (2, {**EP2, "parallel.use_distributed_optimizer": False}),
}
WEIGHTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "other_seed": (1, {"training.seed": 1235}),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "vpp2": (2, VPP2),
    "ep2": (2, EP2),
    "ep2_pp2": (4, {**EP2, **PP2}),
    "tied": (1, TIED),
    "tied_pp2": (2, {**TIED, **PP2}),
    "tied_tp2": (2, {**TIED, **TP2}),
}
BALANCING: dict[str, dict[str, Any]] = {
    kind: {
        "model.moe_router_load_balancing_type": kind,
        "model.moe_aux_loss_coeff": 100.0,
        "model.moe_z_loss_coeff": None,
        "parallel.use_distributed_optimizer": False,
        "training.global_batch_size": 4,
    }
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
}
BALANCED = {
    "aux_loss": ("tp2",),
    "seq_aux_loss": ("single", "dp2", "tp2"),
    "global_aux_loss": ("dp2", "tp2"),
}
"""Ways to cut a batch under which a loss is the same, by kind of loss."""
EXTENDED = ("train:pp2", "train:ep2_plain_optimizer", "weights:pp2", "weights:ep2")
EXTENDED += ("pace:ep2", "pace:pp2")
"""Scenarios whose features another scenario also has."""


def _extended(kind: str) -> list[str]:
    """Return the layouts of the scenarios of a kind in ``EXTENDED``."""
    return [name.removeprefix(f"{kind}:") for name in EXTENDED if name.startswith(f"{kind}:")]


def _scenarios() -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    base = {**FOUR_LAYERS, **BIASED}
    jobs["train:dp1"] = (f"{SCENARIOS}:train", 1, {"overrides": base})
    for name, (world, overrides) in LAYOUTS.items():
        jobs[f"train:{name}"] = (f"{SCENARIOS}:train", world, {"overrides": {**base, **overrides}})
    for name, overrides in (("tied_dp1", TIED), ("tied_pp2", {**TIED, **PP2})):
        world = 2 if "pp2" in name else 1
        jobs[f"train:{name}"] = (f"{SCENARIOS}:train", world, {"overrides": {**FOUR_LAYERS, **overrides}})
    for name, (world, overrides) in WEIGHTS.items():
        jobs[f"weights:{name}"] = (f"{SCENARIOS}:weights", world, {"overrides": {**FOUR_LAYERS, **overrides}})
    jobs["again"] = (f"{SCENARIOS}:build_again", 2, {"overrides": {**base, **EP2, "model.hidden_dropout": 0.1}})
    jobs["form_again"] = (f"{SCENARIOS}:form_again", 2, {"generations": 12})
    jobs["overflow"] = (f"{SCENARIOS}:overflow_of_experts", 2, {})
    jobs["disagree"] = (f"{SCENARIOS}:disagree", 2, {})
    jobs["stop"] = (f"{SCENARIOS}:stop_after_resuming", 2, {})
    for layout, world in (("dp3", 3), ("ep2", 2), ("pp2", 2)):
        overrides = {**FOUR_LAYERS, **LAYOUTS[layout][1]}
        paced = {"overrides": overrides, "slow_rank": 1, "iterations": 10}
        jobs[f"pace:{layout}"] = (f"{SCENARIOS}:pace", world, paced)
    for kind, overrides in BALANCING.items():
        for name, world, extra in (
            ("whole", 1, {"training.micro_batch_size": 4}),
            ("single", 1, {"training.micro_batch_size": 1}),
            ("dp2", 2, {"training.micro_batch_size": 2}),
            ("tp2", 2, {"training.micro_batch_size": 4, **TP2}),
        ):
            if name not in ("whole", *BALANCED[kind]):
                continue
            jobs[f"balance:{kind}:{name}"] = (f"{SCENARIOS}:gradients", world, {"overrides": {**overrides, **extra}})
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    every = runs_extended(request)
    return run_scenarios({name: job for name, job in _scenarios().items() if every or name not in EXTENDED})


@pytest.mark.parametrize("layout", chosen(LAYOUTS, _extended("train")))
def test_every_layout_computes_the_same_iterations(outcomes: dict[str, list[Any]], layout: str) -> None:
    """Losses, auxiliary losses, norms and loads of three iterations are equal, and all ranks have the same values."""
    expected = of_ranks(outcomes, "train:dp1")[0]
    ranks = of_ranks(outcomes, f"train:{layout}")
    assert ranks == [ranks[0]] * len(ranks)
    for key in ("losses", "aux_losses", "z_losses", "grad_norms"):
        assert ranks[0][key] == pytest.approx(expected[key], rel=2e-6, abs=1e-6), key
    assert ranks[0]["tokens"] == expected["tokens"] == [4 * 16] * 3
    assert ranks[0]["load"] == expected["load"]
    assert ranks[0]["evaluation"] == pytest.approx(expected["evaluation"], rel=2e-6)
    assert (ranks[0]["num_padding"] > 0) == layout.startswith("dp3")


def test_tied_embeddings_train_alike_over_a_pipeline(outcomes: dict[str, list[Any]]) -> None:
    expected, ranks = of_ranks(outcomes, "train:tied_dp1")[0], of_ranks(outcomes, "train:tied_pp2")
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=2e-6)
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=2e-6)


@pytest.mark.parametrize("layout", chosen(["tp2", "pp2", "vpp2", "ep2", "ep2_pp2"], _extended("weights")))
def test_weights_depend_on_their_names_only(outcomes: dict[str, list[Any]], layout: str) -> None:
    expected = of_ranks(outcomes, "weights:one")[0]["tensors"]
    ranks = of_ranks(outcomes, f"weights:{layout}")
    together: dict[str, str] = {}
    for rank in ranks:
        assert all(expected[name] == digest for name, digest in rank["tensors"].items())
        together |= rank["tensors"]
    assert together == expected
    assert all(rank["num_sharded"] > 4 for rank in ranks) == (layout == "tp2")
    if layout != "tp2":
        assert max(len(rank["tensors"]) for rank in ranks) < len(expected)


def test_another_seed_gives_other_weights(outcomes: dict[str, list[Any]]) -> None:
    one, other = (of_ranks(outcomes, f"weights:{name}")[0]["tensors"] for name in ("one", "other_seed"))
    assert {name for name in one if one[name] == other[name]} == {name for name in one if "norm" in name}


@pytest.mark.parametrize("layout", ["tied_pp2", "tied_tp2"])
def test_tied_embeddings_share_one_name(outcomes: dict[str, list[Any]], layout: str) -> None:
    expected, ranks = of_ranks(outcomes, "weights:tied")[0]["tensors"], of_ranks(outcomes, f"weights:{layout}")
    embedding = "embedding.word_embeddings.weight"
    assert "output_layer.weight" not in expected
    assert [rank["tensors"][embedding] for rank in ranks] == [expected[embedding]] * 2
    assert {name: digest for rank in ranks for name, digest in rank["tensors"].items()} == expected


def test_a_second_generation_in_the_same_process_is_like_the_first(outcomes: dict[str, list[Any]]) -> None:
    for rank in of_ranks(outcomes, "again"):
        assert rank["second"]["losses"] == rank["first"]["losses"] == rank["fresh"]["losses"]
        assert rank["second"]["state"] == rank["first"]["state"] == rank["fresh"]["state"]
        for generation in rank.values():
            assert generation["sockets_opened"] > 4
            assert generation["sockets_left"] == 0
            assert not generation["initialized"]
            assert generation["seconds_to_leave"] < 20


def test_an_experts_overflow_lowers_the_one_loss_scale(outcomes: dict[str, list[Any]]) -> None:
    """Dense and expert parameters have separate loss scalers, whose scales must stay equal on all ranks."""
    for rank in of_ranks(outcomes, "overflow"):
        assert rank == {"action": "skip", "unchanged": True, "scales": [32.0, 32.0], "next_scale": 32.0}


def test_a_rank_with_another_norm_is_named(outcomes: dict[str, list[Any]]) -> None:
    """A difference in the last bit is detected before any weight is updated."""
    for rank in of_ranks(outcomes, "disagree"):
        assert rank["error_type"] == "TrainingStopped"
        assert "grad_norm" in rank["output"] and "rank 1" in rank["output"]
        assert rank["unchanged"]


@pytest.mark.parametrize("layout", chosen(["dp3", "ep2", "pp2"], _extended("pace")))
def test_a_slow_rank_is_named_though_all_take_as_long(outcomes: dict[str, list[Any]], layout: str) -> None:
    """All ranks' iterations take as long as the slow rank's. Only the time of its own work identifies the slow rank."""
    ranks = of_ranks(outcomes, f"pace:{layout}")
    assert all(rank == ranks[0] for rank in ranks), "everybody knows the same"
    first, *_, late, last = ranks[0]
    assert first == {}, "one iteration says nothing"
    for figures in (late, last):
        assert (figures["slowest_rank"], figures["slowest_node"]) == (1, 11)
        assert figures["slowest_rank_over_median"] > 4.0


@pytest.mark.parametrize("kind", BALANCED)
def test_balancing_weighs_the_same_however_a_batch_is_cut(outcomes: dict[str, list[Any]], kind: str) -> None:
    """Gradient and reported value of a loss are the same if it is defined over the same tokens."""
    expected = of_ranks(outcomes, f"balance:{kind}:whole")[0]
    assert expected["aux_loss"] > 0 and math.isfinite(expected["aux_loss"])
    for layout in BALANCED[kind]:
        for rank in of_ranks(outcomes, f"balance:{kind}:{layout}"):
            assert rank["aux_loss"] == pytest.approx(expected["aux_loss"], rel=1e-4), layout
            for name, norm in rank["norms"].items():
                assert norm == pytest.approx(expected["norms"][name], rel=1e-3), (layout, name)


def test_a_stop_writes_a_window_on_all_ranks_or_on_none(outcomes: dict[str, list[Any]]) -> None:
    """The window is the one from which a recovery continued, so the replaced rank's part is only on peers."""
    first, second = of_ranks(outcomes, "stop")
    assert first["resumed"] == second["resumed"] == []
    (problem,) = [*first["problems"], *second["problems"]]
    assert (
        problem["what"] == "persist"
        and "the parts of ranks [1] are not in the memory of their own nodes" in problem["error"]
    )
    (folder,) = {name.partition("/")[0] for name in first["new"]}
    assert first["new"] == second["new"] == [f"{folder}/rank-00000.window", f"{folder}/rank-00001.window"]


def test_no_generation_leaves_threads_or_open_files_behind(outcomes: dict[str, list[Any]]) -> None:
    for rank in of_ranks(outcomes, "form_again"):
        assert rank["last"] == rank["first"]

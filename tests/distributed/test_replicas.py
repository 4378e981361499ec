"""Tests training with expert replicas over gloo: copies stay equal, moves change no bit, checkpoints fit any
placement."""

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.testing.engines import of_ranks, run_scenarios
from tests.helpers.sharing import chosen, runs_extended

pytestmark = pytest.mark.timeout(400)

SCENARIOS = "tests.helpers.replica_scenarios"
BIASED = {"model.moe_router_score_function": "sigmoid", "model.moe_router_enable_expert_bias": True}
PP2 = {"parallel.pipeline_model_parallel_size": 2, "model.num_layers": 4}
VPP2 = {**PP2, "parallel.virtual_pipeline_model_parallel_size": 2}
TP2 = {"parallel.tensor_model_parallel_size": 2}
FP16 = {"precision.params_dtype": "fp16", "precision.initial_loss_scale": 64.0, "precision.loss_scale_window": 2}
BF16 = {"precision.params_dtype": "bf16"}
PLAIN = {"parallel.use_distributed_optimizer": False}
SEARCH = {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}
IN_PLACE = {"placement.algorithm": SEARCH, "placement.num_slots_per_rank": 2}
"""Every rank always has two distinct experts of each layer."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {"placement.num_slots_per_rank": 5}),
    "two_ranks": (2, {}),
    "three_ranks_padding": (3, {"placement.num_slots_per_rank": 2}),
    "expert_bias": (3, {**BIASED, "placement.num_slots_per_rank": 2}),
    "tensor_and_data_parallel": (4, {**TP2, "placement.num_slots_per_rank": 2}),
    "interleaved": (4, VPP2),
    "recompute": (2, {"training.recompute_granularity": "full"}),
    "plain_optimizer": (2, PLAIN),
    "cpp": (2, {"placement.dispatch_backend": "cpp"}),
    "capacity": (2, {"model.moe_expert_capacity_factor": 1.0}),
}
MOVES: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (3, {**BIASED, "model.hidden_dropout": 0.1, "placement.num_slots_per_rank": 2}),
    "fp16": (2, FP16),
    "bf16_plain_optimizer": (2, {**BF16, **PLAIN}),
    "pipeline": (4, {**PP2, **BF16}),
    "tensor_parallel": (2, {**TP2, **BF16}),
    "in_place": (3, {**BF16, **IN_PLACE}),
}
EXTENDED = ("one_rank", "recompute", "plain_optimizer")
EXTENDED_MOVES = ("fp16", "tensor_parallel")
"""Layouts and moves whose features another one also has."""
LOADS = (
    ("replicas_2", "plain_1"),
    ("plain_1", "replicas_2"),
    ("replicas_2", "replicas_3"),
    ("replicas_2", "same"),
    ("in_place_3", "plain_1"),
    ("in_place_3", "same"),
)


def _of_model(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that change the numbers: not layout, placement or kernels."""
    return {key: value for key, value in overrides.items() if key.split(".")[0] in ("model", "precision")}


def _scenarios(folder: Path, *, extended: bool) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for name, (world, overrides) in LAYOUTS.items():
        if name in EXTENDED and not extended:
            continue
        plain = _of_model(overrides)
        jobs[f"plain:{plain}"] = (f"{SCENARIOS}:train", 1, {"overrides": plain, "replicas": False})
        jobs[f"moved:{name}"] = (f"{SCENARIOS}:train", world, {"overrides": overrides, "replicas": True})
    for name, (world, overrides) in MOVES.items():
        if name in EXTENDED_MOVES and not extended:
            continue
        jobs[f"moves:{name}"] = (f"{SCENARIOS}:moves", world, {"overrides": overrides})
    jobs["gradients"] = (f"{SCENARIOS}:gradients", 3, {"overrides": {"placement.num_slots_per_rank": 2}})
    arguments = {"overrides": {**BF16, **IN_PLACE}, "directory": str(folder)}
    jobs["history"] = (f"{SCENARIOS}:history", 3, arguments)
    return jobs | _checkpoint_scenarios(folder)


def _checkpoint_scenarios(folder: Path) -> dict[str, Any]:
    """Return the scenarios, those that save first, because scenarios run in this order."""
    layouts = {"replicas_2": (2, {}), "plain_1": (1, None), "replicas_3": (3, {}), "in_place_3": (3, IN_PLACE)}
    jobs = {}

    def arguments(name: str, saved: str, *, save: bool) -> dict[str, Any]:
        overrides = layouts[name][1]
        replicas = overrides is not None
        return {"overrides": overrides or {}, "replicas": replicas, "directory": str(folder / saved), "save": save}

    for name in ("replicas_2", "plain_1", "in_place_3"):
        jobs[f"save:{name}"] = (f"{SCENARIOS}:checkpoints", layouts[name][0], arguments(name, name, save=True))
    for saved, loaded in LOADS:
        name = saved if loaded == "same" else loaded
        found = arguments(name, saved, save=False)
        jobs[f"load:{saved}:{loaded}"] = (f"{SCENARIOS}:checkpoints", layouts[name][0], found)
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scenarios = _scenarios(tmp_path_factory.mktemp("replicas"), extended=runs_extended(request))
    return run_scenarios(scenarios, timeout_seconds=380)


def _plain(outcomes: dict[str, list[Any]], layout: str) -> dict[str, Any]:
    """Return the run of a layout's model on one rank without replicas."""
    return of_ranks(outcomes, f"plain:{_of_model(LAYOUTS[layout][1])}")[0]


@pytest.mark.parametrize("layout", chosen(LAYOUTS, EXTENDED))
def test_replicas_compute_what_one_rank_computes(outcomes: dict[str, list[Any]], layout: str) -> None:
    """Compare losses, auxiliary losses, norms, loads and biases of two iterations, two more after a move, and an
    evaluation."""
    expected, ranks = _plain(outcomes, layout), of_ranks(outcomes, f"moved:{layout}")
    assert (sum(rank["moved"] for rank in ranks) > 0) == (len(ranks) > 1)
    for rank in ranks:
        for key in ("losses", "aux_losses", "grad_norms", "evaluation"):
            assert rank[key] == pytest.approx(expected[key], rel=1e-5), key
        assert rank["load"] == expected["load"] and sum(map(sum, rank["load"])) > 0
        assert rank["bias"] in (expected["bias"], expected["bias"][:2], expected["bias"][2:])
        assert (rank["num_padding"] > 0) == (len(ranks) == 3)


@pytest.mark.parametrize("layout", chosen([name for name, (world, _) in LAYOUTS.items() if world > 1], EXTENDED))
def test_copies_end_equal(outcomes: dict[str, list[Any]], layout: str) -> None:
    """Compare weights, masters and moments of all ranks that have an expert, bit by bit."""
    digests: dict[str, list[str]] = {}
    for rank in of_ranks(outcomes, f"moved:{layout}"):
        for name, digest in rank["experts"].items():
            digests.setdefault(name, []).append(digest)
    assert sum(len(found) > 1 for found in digests.values()) >= 8, "some experts have copies on several ranks"
    assert [name for name, found in digests.items() if len(set(found)) > 1] == []


def test_gradients_of_copies_are_one_sum(outcomes: dict[str, list[Any]]) -> None:
    ranks = of_ranks(outcomes, "gradients")
    names = {name for rank in ranks for name in rank["after"]}
    shared = 0
    for name in names:
        holders = [rank for rank in ranks if name in rank["after"]]
        shared += len(holders) > 1
        assert len({rank["digests"][name] for rank in holders}) == 1, name
        total = [math.fsum(values) for values in zip(*(rank["before"][name] for rank in holders), strict=True)]
        assert holders[0]["after"][name] == pytest.approx(total, rel=1e-5, abs=1e-9), name
    assert shared > 4
    assert any(rank["before"][name] != rank["after"][name] for rank in ranks for name in rank["after"])


def test_the_norm_counts_each_expert_once(outcomes: dict[str, list[Any]]) -> None:
    """The optimizer shards dense gradients. Their sum of squares is taken from the norm of the run without replicas."""
    ranks = of_ranks(outcomes, "gradients")
    once: dict[str, float] = {}
    every = 0.0
    for rank in ranks:
        for name, square in rank["squares"].items():
            if ".local_experts." in name:
                once[name] = square
                every += square
    assert every > 1.05 * sum(once.values()), "copies would count"
    plain = _plain(outcomes, "three_ranks_padding")["grad_norms"][0]
    assert {rank["grad_norm"] for rank in ranks} == {ranks[0]["grad_norm"]}
    assert ranks[0]["grad_norm"] == pytest.approx(plain, rel=1e-6)
    assert ranks[0]["grad_norm"] ** 2 > sum(once.values())


@pytest.mark.parametrize("kind", chosen(MOVES, EXTENDED_MOVES))
def test_a_move_changes_no_bit(outcomes: dict[str, list[Any]], kind: str) -> None:
    """Make three moves, and compare weights, masters, moments, buffers, random states, loss scale and learning rate."""
    ranks = of_ranks(outcomes, f"moves:{kind}")
    assert max(moved for rank in ranks for moved in rank["moved"]) > 0
    experts: dict[str, set[str]] = {}
    for rank in ranks:
        first, *later = rank["digests"]
        for state in (first, *later):
            for name, digest in state.items():
                if ".local_experts." in name:
                    experts.setdefault(name, set()).add(digest)
        own = [{name: digest for name, digest in state.items() if ".local_experts." not in name} for state in later]
        assert all(state == {k: v for k, v in first.items() if ".local_experts." not in k} for state in own)
        # Expert loads and learning rates are set again in each iteration; only building a model changes them before.
        kept = [{k: v for k, v in state.items() if not k.startswith(("load.", "learn"))} for state in rank["volatile"]]
        assert kept == [kept[0]] * 3
        assert len(rank["losses"]) == 2 and all(map(math.isfinite, rank["losses"]))
    assert [name for name, digests in experts.items() if len(digests) > 1] == []
    if kind == "in_place":
        assert [rank["in_place"] for rank in ranks] == [3] * len(ranks)
    if kind == "fp16":
        assert {scale for rank in ranks for scale in rank["scales"]} == {128.0}, "the scale had grown before the moves"


@pytest.mark.parametrize(("saved", "loaded"), LOADS)
def test_checkpoints_fit_any_placement(outcomes: dict[str, list[Any]], saved: str, loaded: str) -> None:
    """A checkpoint is loaded with copies, without copies and on other ranks. Weights are the same, and later iterations
    too."""
    before, after = of_ranks(outcomes, f"save:{saved}"), of_ranks(outcomes, f"load:{saved}:{loaded}")
    weights = {name: digest for rank in before for name, digest in rank["weights"].items()}
    found = [pair for rank in after for pair in rank["weights"].items()]
    assert {name for name, _ in found} == weights.keys() and len(weights) > 20
    assert [name for name, digest in found if weights[name] != digest] == []
    for rank in after:
        assert rank["losses"] == pytest.approx(before[0]["losses"], rel=1e-5)


@pytest.mark.parametrize("name", ["replicas_2", "in_place_3"])
def test_resuming_after_a_move_is_bitwise(outcomes: dict[str, list[Any]], name: str) -> None:
    """The resumed job uses the placement that was introduced by the move. Checkpoints were also saved before it."""
    before, after = of_ranks(outcomes, f"save:{name}"), of_ranks(outcomes, f"load:{name}:same")
    assert {rank["in_place"] for rank in before} == {1 if name == "in_place_3" else 0}
    for saved, loaded in zip(before, after, strict=True):
        assert loaded["placement_differs"]
        assert loaded["state"] == saved["state"]
        assert loaded["losses"] == saved["losses"]


def test_a_run_rebalanced_in_place_equals_one_that_builds_the_model_again(outcomes: dict[str, list[Any]]) -> None:
    for rank in of_ranks(outcomes, "history"):
        assert rank["changes"] > 0 and rank["in_place"] > 0
        assert len(rank["own"]) == 6
        assert rank["own"] == rank["scripted"]

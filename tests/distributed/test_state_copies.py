"""Tests copies of optimizer state: after a failure in any phase they are at the iteration of their rank, and the shards
of the distributed optimizer can be restored from them."""

from typing import Any

import pytest

from megatron_ft.testing.engines import of_ranks, run_scenarios
from tests.helpers.sharing import chosen, runs_extended

pytestmark = pytest.mark.timeout(400)

SCENARIOS = "tests.helpers.state_copy_scenarios"
BF16 = {"precision.params_dtype": "bf16"}
FP16 = {"precision.params_dtype": "fp16", "precision.initial_loss_scale": 64.0, "precision.loss_scale_window": 1}
FP8 = {**BF16, "precision.fp8": "hybrid", "precision.fp8_recipe": "blockwise"}
FP8_MASTERS = {**FP8, "precision.regime": "fp8_fp8_fp8_fp16"}
FP16_STATE = {**FP16, "precision.regime": "fp16_fp16_fp16_fp16"}
CLIPPED = {**BF16, "optimizer.clip_grad": 0.01}
"""The gradient norm is above this limit in every iteration."""
PHASES = {"grad_sync": 2, "vote_before": 2, "vote_inside": 2, "vote_after": 3, "update": 3, "gather": 3}
"""Iteration after which each rank continues if it fails in a phase of iteration 3. The gradients of the copies are
exchanged between the first two phases."""
EXTENDED = ("vote_before", "vote_inside", "update", "unclipped", "skipped:bf16", "skipped:fp16", "restored:fp32")
"""Phases and scenarios whose path another one also takes."""
SMALL_LIMIT = 4096
"""Bytes that a rank sends and receives at a time, so that a move of shards needs several rounds."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    jobs: dict[str, Any] = {}
    for phase in PHASES:
        jobs[phase] = (f"{SCENARIOS}:broken", 3, {"overrides": CLIPPED, "phase": phase})
    jobs["undisturbed"] = (f"{SCENARIOS}:broken", 3, {"overrides": CLIPPED, "phase": None})
    jobs["fp32"] = (f"{SCENARIOS}:broken", 2, {"overrides": {}, "phase": "update"})
    jobs["unclipped"] = (f"{SCENARIOS}:broken", 2, {"overrides": {"optimizer.clip_grad": 0.0}, "phase": "update"})
    jobs["fp8"] = (f"{SCENARIOS}:broken", 2, {"overrides": FP8_MASTERS, "phase": "update"})
    jobs["inside"] = (f"{SCENARIOS}:broken_update", 2, {})
    for name, overrides in (("bf16", BF16), ("fp16", FP16), ("fp16_state", FP16_STATE)):
        jobs[f"skipped:{name}"] = (f"{SCENARIOS}:skipped", 2, {"overrides": overrides})
    for name, overrides in (("fp32", {}), ("bf16", BF16), ("fp8", FP8_MASTERS)):
        arguments = {"overrides": overrides, "without": [1], "limit_bytes": SMALL_LIMIT}
        jobs[f"restored:{name}"] = (f"{SCENARIOS}:restored", 3, arguments)
    arguments = {"overrides": BF16, "without": [1, 2], "limit_bytes": SMALL_LIMIT}
    jobs["lost"] = (f"{SCENARIOS}:restored", 3, arguments)
    every = runs_extended(request)
    wanted = {name: job for name, job in jobs.items() if every or name not in EXTENDED}
    return run_scenarios(wanted, timeout_seconds=380)


def _check_copies(ranks: list[dict[str, Any]]) -> None:
    """Compare the copies on each rank with the state of their owners."""
    num_compared = 0
    for rank in ranks:
        for owner, tensors in rank["kept"].items():
            own = ranks[int(owner)]["own"]
            assert tensors == {name: own[name] for name in tensors}
            num_compared += len(tensors)
    assert num_compared >= 4 * len(ranks)


@pytest.mark.parametrize("phase", chosen(PHASES, EXTENDED))
def test_copies_are_at_the_iteration_of_their_rank(outcomes: dict[str, list[Any]], phase: str) -> None:
    """Every rank fails, and finishes or rolls back the iteration alone. Finished copies have the bits of a run without
    a failure."""
    ranks = of_ranks(outcomes, phase)
    assert [rank["iteration"] for rank in ranks] == [PHASES[phase]] * 3
    _check_copies(ranks)
    expected = of_ranks(outcomes, "undisturbed")
    is_finished = PHASES[phase] == 3
    assert [rank["kept"] == other["kept"] for rank, other in zip(ranks, expected, strict=True)] == [is_finished] * 3


@pytest.mark.parametrize("name", chosen(["fp32", "unclipped", "fp8"], EXTENDED))
def test_copies_are_finished_in_every_precision(outcomes: dict[str, list[Any]], name: str) -> None:
    ranks = of_ranks(outcomes, name)
    assert [rank["iteration"] for rank in ranks] == [3] * 2
    _check_copies(ranks)


def test_copies_take_the_memory_that_the_plan_states(outcomes: dict[str, list[Any]]) -> None:
    ranks = of_ranks(outcomes, "undisturbed")
    kept = sum(rank["kept_bytes"] for rank in ranks) / len(ranks)
    assert kept == pytest.approx(ranks[0]["planned_bytes"], rel=0.01) and kept > 0


def test_a_rank_whose_copies_are_partly_updated_has_no_usable_state(outcomes: dict[str, list[Any]]) -> None:
    for rank, error in enumerate(of_ranks(outcomes, "inside")):
        assert error.startswith(f"rank {rank}: iteration 3 failed in the middle of its update")


@pytest.mark.parametrize("name", chosen(["bf16", "fp16", "fp16_state"], ["bf16", "fp16"]))
def test_a_skipped_iteration_changes_no_copy(outcomes: dict[str, list[Any]], name: str) -> None:
    by_rank = of_ranks(outcomes, f"skipped:{name}")
    before, skipped, after = (list(ranks) for ranks in zip(*by_rank, strict=True))
    assert [rank["skips"] for rank in skipped] == [1] * 2
    assert [rank["kept"] for rank in skipped] == [rank["kept"] for rank in before]
    assert all(rank["kept"] != other["kept"] for rank, other in zip(after, before, strict=True))
    for ranks in (before, skipped, after):
        _check_copies(ranks)


@pytest.mark.parametrize("precision", chosen(["fp32", "bf16", "fp8"], ["fp32"]))
def test_shards_are_restored_from_copies(outcomes: dict[str, list[Any]], precision: str) -> None:
    """One rank has lost its shard. It gets the shard back from its copy on another rank, and every rank gets all
    non-expert weights, in several rounds."""
    for rank in of_ranks(outcomes, f"restored:{precision}"):
        assert rank["missing"] is None and rank["after"] == rank["before"]


def test_a_shard_without_a_copy_is_named(outcomes: dict[str, list[Any]]) -> None:
    """The owner of a shard and the rank with its copy are both lost."""
    for rank in of_ranks(outcomes, "lost"):
        assert rank["missing"].startswith("no living rank holds these elements: ")
        assert "master and moments elements " in rank["missing"]

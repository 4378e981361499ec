"""Tests that jobs with pipeline and tensor parallelism continue on fewer nodes, bit by bit."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.elastic_jobs import (
    SAVING,
    check_like_fresh,
    check_same,
    digests,
    faults,
    figures,
    fresh,
    job,
    kill,
    lose,
    memberships,
    records,
    repeats,
    script,
    write_skewed,
)
from tests.helpers.elastic_ranks import run_jobs
from tests.helpers.sharing import chosen, runs_extended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # trains

ALGORITHM = {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}
NARROW = {
    "parallel.pipeline_model_parallel_size": 2,
    "placement.algorithm": ALGORITHM,
    "placement.num_slots_per_rank": 4,
}
"""With four nodes of one rank each: nodes 0 and 1 have stage 0. With three nodes, one of them is a hot spare."""
WIDE = {**NARROW, "placement.num_slots_per_rank": 3, "launch.ranks_per_node": 2}
"""With four nodes of two ranks each: nodes 0 and 1 have stage 0. With three nodes, a rank changes its stage."""
SHARDED = {
    "parallel.use_distributed_optimizer": True,
    "placement.state_copies": 2,
    "precision.params_dtype": "bf16",
}
TENSOR = {**NARROW, "launch.ranks_per_node": 2, "parallel.tensor_model_parallel_size": 2}
TIED = {"model.untie_embeddings_and_output_weights": False}
LEFT = {"narrow": [0, 2, 3], "wide": [1, 2, 3]}
"""Nodes that remain without rank 1."""
PHASES = ("grad_sync", "vote_before", "vote_inside", "vote_after", "update", "gather")
EXTENDED = {
    *(("narrow", phase) for phase in ("grad_sync", "vote_before", "vote_inside", "update", "gather")),
    *(("wide", phase) for phase in ("vote_before", "vote_inside", "vote_after", "update", "gather")),
    "reform_join",
    "reform_build",
    "interleaved",
    "tied",
    "narrow",
    "migrate_step",
    "migrate_build",
}
"""Layouts and phases of losses, phases of second losses, and layouts, whose path another loss also takes."""
INTERLEAVED = {
    "model.num_layers": 4,
    "parallel.virtual_pipeline_model_parallel_size": 2,
}
ONE_COPY = {"placement.min_replicas": 1}
NO_COPIES = {"placement.state_copies": 1}
MIXED = (3, 1, 1, 2, 2, 3)
"""Node of each rank of ``WIDE`` without node 0: a rank of node 3 has changed from stage 1 to stage 0."""
FRESH = {"narrow": (0, 2), "wide": MIXED, "tied": MIXED, "interleaved": MIXED, "tensor": (0, 0, 2, 2)}
"""Nodes of the ranks after a loss, by job."""
GROWN = {
    node: (f"lose(nodes=[{node}],before_iteration=3)", f"join(nodes=[{node}],before_iteration=5)") for node in (1, 2)
}
CHANGES = {node: {"2": {"leave": [node]}, "4": {"join": [node]}} for node in (1, 2)}
EAGER = {
    "placement.rebalance_interval_iterations": 2,
    "placement.rebalance_min_gain": 0.0,
    "placement.rebalance_bytes_per_token": 1e12,
}
SPREAD = {"placement.algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"}}
MIGRATIONS = {"migrate_build": (SPREAD, 1, 5), "migrate_step": ({"placement.num_slots_per_rank": 2}, 5, 3)}
"""Keys of jobs whose experts move, by building the model again or in place; the rank that dies; and the iteration
before which this happens. In place, only experts of stage 1 move."""
AFTER_A_JOIN = 'kill(node=3, at_iteration=5, phase="forward", generation=2)'
"""Death of the only rank that had the state of stage 1 when node 2 joined, in the first iteration after that."""
FORMING = ("reform_join", "reform_move", "reform_build")


def _fresh(folder: Path, name: str, nodes: tuple[int, ...], loaded: int, **overrides: Any) -> dict[str, Any]:
    """Return a job of one rank on each of ``nodes``, which are the nodes of the ranks of job ``name``."""
    found = fresh(folder, name, nodes, loaded, **overrides)
    found["overrides"]["launch.ranks_per_node"] = 1
    return found


def _jobs(folder: Path, *, extended: bool) -> dict[str, Any]:
    jobs = {
        "narrow": job({**NARROW, **lose((1, 3)), **SAVING}, until=6),
        "narrow:3": job({**NARROW, **lose((1, 3))}),
        "narrow:4": job({**NARROW, **lose((1, 4))}),
        "wide": job({**WIDE, **SHARDED, **lose((0, 3)), **SAVING}, until=6),
        "fresh:wide": _fresh(folder, "wide", MIXED, 2, **WIDE, **SHARDED),
        "wide:3": job({**WIDE, **SHARDED, **lose((0, 3))}),
        "tensor": job({**TENSOR, **SHARDED, **lose((1, 3)), **SAVING}, until=6),
        "fresh:tensor": _fresh(folder, "tensor", (0, 0, 2, 2), 2, **{**TENSOR, **SHARDED, **ONE_COPY, **NO_COPIES}),
        "killed:tensor": job({**TENSOR, **SHARDED, **faults(kill(3, 3, "backward")), **SAVING}, until=6),
        "wide grown": job({**WIDE, **SHARDED, **script(*GROWN[2])}, until=6),
        "killed:after a join": job({**NARROW, **faults(AFTER_A_JOIN)}, until=6, changes=CHANGES[2]),
        "after a join": job({**NARROW, **repeats("killed:after a join")}, until=6),
        "wide planned": job({**WIDE, **SHARDED, **faults()}, until=6, changes=CHANGES[2]),
    }
    if extended:
        jobs["back at once"] = job({**WIDE, **SHARDED, **script("change(lose=[0],join=[0],before_iteration=3)")})
        jobs["killed:back at once"] = job(
            {**WIDE, **SHARDED, **faults('kill(rank=0, at_iteration=3, phase="backward", generation=0)')},
            returns={"2": [0]},
        )
        jobs["fresh:narrow"] = _fresh(folder, "narrow", (0, 2), 2, **NARROW, **ONE_COPY)
        jobs["wide:4"] = job({**WIDE, **SHARDED, **lose((0, 4))})
        jobs["narrow grown"] = job({**NARROW, **script(*GROWN[1])}, until=6)
        jobs["narrow planned"] = job({**NARROW, **faults()}, until=6, changes=CHANGES[1])
        jobs["tied"] = job({**WIDE, **TIED, **lose((0, 3)), **SAVING}, until=6)
        jobs["fresh:tied"] = _fresh(folder, "tied", MIXED, 2, **WIDE, **TIED)
        jobs["killed:tied"] = job({**WIDE, **TIED, **faults(kill(0, 3, "backward")), **SAVING}, until=6)
        interleaved = {**WIDE, **INTERLEAVED, **SAVING}
        jobs["interleaved"] = job({**interleaved, **lose((0, 3))}, until=6)
        jobs["fresh:interleaved"] = _fresh(folder, "interleaved", MIXED, 2, **WIDE, **INTERLEAVED)
        jobs["killed:interleaved"] = job({**interleaved, **faults(kill(0, 3, "backward"))}, until=6)
    skewed = write_skewed(folder)
    for phase, (more, rank, before) in MIGRATIONS.items():
        if phase in EXTENDED and not extended:
            continue
        moving = {**WIDE, **SHARDED, **skewed, **EAGER, **more}
        jobs[f"moved:{phase}"] = job({**moving, **lose((rank // 2, before))}, until=6)
        jobs[f"killed:{phase}"] = job({**moving, **faults(kill(rank, before, phase))}, until=6)
    for name, phase in product(("narrow", "wide"), PHASES):
        if extended or (name, phase) not in EXTENDED:
            keys = NARROW if name == "narrow" else {**WIDE, **SHARDED}
            jobs[f"killed:{name}:{phase}"] = job({**keys, **faults(kill(1, 3, phase))})
    for phase in FORMING:
        if phase in EXTENDED and not extended:
            continue
        jobs[f"killed:twice:{phase}"] = job({**WIDE, **SHARDED, **faults(kill(0, 3, "backward"), kill(5, 2, phase))})
        jobs[f"twice:{phase}"] = job({**WIDE, **SHARDED, **repeats(f"killed:twice:{phase}")})
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lanes")
    return run_jobs(_jobs(folder, extended=runs_extended(request)), folder, timeout_seconds=880)


def _check_ranks(outcomes: dict[str, Any], name: str) -> None:
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert [rank["error"] for rank in outcomes[name]["ranks"] if rank["error"]] == []


@pytest.mark.parametrize("loss", chosen(product(LEFT, PHASES), EXTENDED), ids="-".join)
def test_a_killed_rank_leaves_the_bits_of_its_history(outcomes: dict[str, Any], loss: tuple[str, str]) -> None:
    """A rank of stage 0 is killed in iteration 3, before or after the vote is complete."""
    name, phase = loss
    killed = f"killed:{name}:{phase}"
    _check_ranks(outcomes, killed)
    (target,) = outcomes[killed]["targets"]
    check_same(outcomes, killed, f"{name}:{target['iteration'] + 1}")
    assert memberships(outcomes, killed) == [(1, LEFT[name], target["iteration"])]


def test_hot_spares_have_no_rank(outcomes: dict[str, Any]) -> None:
    """Node 3 stays a member, but three nodes of one rank have only one rank for each stage."""
    assert len(digests(outcomes, "narrow")[2]) == 4 and len(digests(outcomes, "narrow")[3]) == 2


@pytest.mark.parametrize("name", chosen(["tied", "interleaved", "tensor"], EXTENDED))
def test_other_layouts_continue_in_the_same_way(outcomes: dict[str, Any], name: str) -> None:
    _check_ranks(outcomes, f"killed:{name}")
    check_same(outcomes, f"killed:{name}", name)


@pytest.mark.parametrize("name", chosen(FRESH, EXTENDED))
def test_a_membership_trains_like_a_job_of_its_size(outcomes: dict[str, Any], name: str) -> None:
    check_like_fresh(outcomes, name, f"fresh:{name}", FRESH[name], 2)


@pytest.mark.parametrize("name", chosen(["narrow", "wide"], EXTENDED))
def test_nodes_leave_and_join_when_asked_for(outcomes: dict[str, Any], name: str) -> None:
    """In the narrow job a hot spare gets a rank again; in the wide job a rank returns to its first stage."""
    _check_ranks(outcomes, f"{name} planned")
    assert memberships(outcomes, f"{name} planned") == memberships(outcomes, f"{name} grown")
    assert digests(outcomes, f"{name} planned") == digests(outcomes, f"{name} grown")
    assert figures(outcomes, f"{name} planned") == figures(outcomes, f"{name} grown")


def test_a_node_that_has_just_joined_continues_with_the_state_of_its_place(outcomes: dict[str, Any]) -> None:
    name = "killed:after a join"
    _check_ranks(outcomes, name)
    assert [made[:2] for made in memberships(outcomes, name)[-2:]] == [(2, [0, 1, 2, 3]), (3, [0, 1, 2])]
    check_same(outcomes, name, "after a join")


@pytest.mark.extended
def test_a_node_is_back_in_the_membership_that_follows_its_loss(outcomes: dict[str, Any]) -> None:
    _check_ranks(outcomes, "killed:back at once")
    (changed,) = records(outcomes, "killed:back at once", "membership_changed")
    assert (changed["nodes"], changed["joining"]) == ([0, 1, 2, 3], [0])
    check_same(outcomes, "killed:back at once", "back at once")


@pytest.mark.parametrize("phase", chosen(MIGRATIONS, EXTENDED))
def test_a_rank_dies_while_experts_move(outcomes: dict[str, Any], phase: str) -> None:
    name = f"killed:{phase}"
    _check_ranks(outcomes, name)
    assert outcomes[name]["ranks"][MIGRATIONS[phase][1]]["records"][-1]["phase"] == phase
    check_same(outcomes, name, f"moved:{phase}")


@pytest.mark.parametrize("phase", chosen(FORMING, EXTENDED))
def test_a_second_rank_dies_while_ranks_change_their_stages(outcomes: dict[str, Any], phase: str) -> None:
    """The state that a rank had in its former stage is used after the interruption."""
    name = f"killed:twice:{phase}"
    _check_ranks(outcomes, name)
    assert [target["iteration"] for target in outcomes[name]["targets"]] == [2, 2]
    assert memberships(outcomes, name)[-1] == (2, [1, 3], 2)
    check_same(outcomes, name, f"twice:{phase}")

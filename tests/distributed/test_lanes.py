"""Tests that jobs with pipeline and tensor parallelism continue on fewer nodes, bit by bit."""

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
)
from tests.helpers.elastic_ranks import run_jobs

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
PHASES = ("grad_sync", "vote_before", "vote_inside", "vote_after", "update", "gather")
FORMING = ("reform_join", "reform_move", "reform_build")


def _fresh(folder: Path, name: str, nodes: tuple[int, ...], loaded: int, **overrides: Any) -> dict[str, Any]:
    """Return a job of one rank on each of ``nodes``, which are the nodes of the ranks of job ``name``."""
    found = fresh(folder, name, nodes, loaded, **overrides)
    found["overrides"]["launch.ranks_per_node"] = 1
    return found


ONE_COPY = {"placement.min_replicas": 1}


def _jobs(folder: Path) -> dict[str, Any]:
    jobs = {
        "narrow": job({**NARROW, **lose((1, 3)), **SAVING}, until=6),
        "narrow:4": job({**NARROW, **lose((1, 4))}),
        "fresh:narrow": _fresh(folder, "narrow", (0, 2), 2, **NARROW, **ONE_COPY),
        "wide": job({**WIDE, **SHARDED, **lose((0, 3)), **SAVING}, until=6),
        "fresh:wide": _fresh(folder, "wide", (3, 1, 1, 2, 2, 3), 2, **WIDE, **SHARDED),
        "tied": job({**WIDE, **TIED, **lose((0, 3)), **SAVING}, until=6),
        "fresh:tied": _fresh(folder, "tied", (3, 1, 1, 2, 2, 3), 2, **WIDE, **TIED),
        "killed:tied": job({**WIDE, **TIED, **faults(kill(0, 3, "backward"))}, until=6),
        "grown": job({**NARROW, **script("lose(nodes=[1],before_iteration=3)", "join(nodes=[1],before_iteration=5)")}, until=6),
        "planned": job({**NARROW, **faults()}, until=6, changes={"2": {"leave": [1]}, "4": {"join": [1]}}),
        "back at once": job({**WIDE, **SHARDED, **script("change(lose=[0],join=[0],before_iteration=3)")}),
        "killed:back at once": job(
            {**WIDE, **SHARDED, **faults('kill(rank=0, at_iteration=3, phase="backward", generation=0)')},
            returns={"2": [0]},
        ),
        "wide grown": job(
            {**WIDE, **SHARDED, **script("lose(nodes=[2],before_iteration=3)", "join(nodes=[2],before_iteration=5)")},
            until=6,
        ),
        "wide planned": job(
            {**WIDE, **SHARDED, **faults()}, until=6, changes={"2": {"leave": [2]}, "4": {"join": [2]}}
        ),
        "tensor": job({**TENSOR, **SHARDED, **lose((1, 3)), **SAVING}, until=6),
        "killed:tensor": job({**TENSOR, **SHARDED, **faults(kill(3, 3, "backward"))}, until=6),
        "killed:tensor:2": job({**TENSOR, **faults(kill(6, 3, "vote_inside"))}),
    }
    for phase in PHASES:
        jobs[f"killed:narrow:{phase}"] = job({**NARROW, **faults(kill(1, 3, phase))})
        jobs[f"killed:wide:{phase}"] = job({**WIDE, **SHARDED, **faults(kill(1, 3, phase))}, until=6)
    for phase in FORMING:
        jobs[f"killed:twice:{phase}"] = job({**WIDE, **SHARDED, **faults(kill(0, 3, "backward"), kill(5, 2, phase))})
        jobs[f"twice:{phase}"] = job({**WIDE, **SHARDED, **repeats(f"killed:twice:{phase}")})
    return jobs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lanes")
    return run_jobs(_jobs(folder), folder, timeout_seconds=880)

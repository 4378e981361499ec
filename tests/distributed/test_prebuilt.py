"""Tests spares that build model and optimizer before a node is lost: the job ends with the bits of an undisturbed run,
whatever the spare has built."""

from typing import Any

import pytest

from tests.distributed.test_in_place import LAYOUTS, job, kill
from tests.helpers.elastic_jobs import digests, figures, records
from tests.helpers.elastic_ranks import run_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # trains

SHARDED = {**LAYOUTS["pp2 sharded"], "parallel.expert_model_parallel_size": 1, "model.hidden_dropout": 0.1}
DENSE_FIRST = {**LAYOUTS["pp2 sharded"], "model.num_layers": 4, "model.moe_first_dense_layers": 2}
"""The first stage has no experts, so it does not know the parameter groups of the second stage."""
REFERENCES: dict[str, dict[str, Any]] = {
    "sharded": SHARDED,
    "vpp2": LAYOUTS["pp2 vpp2"],
    "overlap": LAYOUTS["pp2 overlap"],
    "dense first": DENSE_FIRST,
}
FAULTS: dict[str, tuple[str, int, list[str], list[tuple[int, str]]]] = {
    "sharded: the same rank": ("sharded", 1, [kill(0, 8, "gather")], [(0, "in_advance")]),
    "sharded: another rank of the stage": ("sharded", 1, [kill(1, 8, "backward")], [(1, "optimizer")]),
    "sharded: another stage": ("sharded", 1, [kill(2, 8, "forward")], [(2, "all")]),
    "sharded: the second part": ("sharded", 2, [kill(2, 8, "vote_after")], [(2, "in_advance")]),
    "sharded: nothing in advance": ("sharded", 0, [kill(0, 8, "gather")], [(0, "all")]),
    "sharded: a loss while it connects": (
        "sharded",
        2,
        [kill(3, 8, "backward"), kill(0, 7, "reform_move", 1)],
        [(3, "optimizer"), (0, "all"), (3, "kept")],
    ),
    "vpp2: another rank of the stage": ("vpp2", 1, [kill(1, 8, "dispatch")], [(1, "optimizer")]),
    "dense first: other parameter groups": ("dense first", 4, [kill(0, 8, "update")], [(0, "optimizer")]),
    "overlap: the same rank": ("overlap", 4, [kill(3, 8, "grad_sync")], [(3, "in_advance")]),
}
"""Layout, number of parts that the spare builds in advance, faults, and what substitutes report to have built."""


def _jobs() -> dict[str, Any]:
    jobs = {name: job([], **overrides) for name, overrides in REFERENCES.items()}
    for name, (reference, num_parts, faults, _) in FAULTS.items():
        about = {"nodes.num_spare_nodes": 1, "nodes.num_prebuilt_parts": num_parts}
        made = job(faults, **REFERENCES[reference], **about)
        jobs[name] = {**made, "spares": [4], "num_prebuilt": num_parts, "keepers_live": True, "num_keepers": 5}
    return jobs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_jobs(_jobs(), tmp_path_factory.mktemp("prebuilt"), timeout_seconds=580)


@pytest.mark.parametrize("name", FAULTS)
def test_undisturbed_bits(outcomes: dict[str, Any], name: str) -> None:
    """Compare losses, and the state of every rank after every iteration."""
    reference, _, faults, _ = FAULTS[name]
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert digests(outcomes, name) == digests(outcomes, reference)
    assert figures(outcomes, name) == figures(outcomes, reference)
    assert len(records(outcomes, name, "failpoint_hit")) == len(faults)


@pytest.mark.parametrize("name", FAULTS)
def test_what_was_built_is_reported(outcomes: dict[str, Any], name: str) -> None:
    _, num_parts, _, expected = FAULTS[name]
    parts = records(outcomes, name, "part_built")
    assert len(parts) == num_parts
    assert all(part["node"] == 4 and part["state_bytes"] > 0 for part in parts)
    shares = [share for share in records(outcomes, name, "stage_recovery") if share["built"] != "kept"]
    found = [(share["rank"], share["built"]) for share in shares]
    assert set(found) <= set(expected)
    assert found[0] == expected[0] or len(FAULTS[name][2]) > 1
    for share in shares:
        assert bool(share["why_built"]) == (share["built"] == "all" and share["rank"] == expected[0][0])

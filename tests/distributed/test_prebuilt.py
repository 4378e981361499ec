"""Tests spares that build model and optimizer before a node is lost: the job ends with the bits of an undisturbed run,
whatever the spare has built."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ft.testing.engines import run_scenarios
from megatron_ft.testing.jobs import run_job
from tests.distributed.test_in_place import LAYOUTS, job, kill
from tests.helpers.elastic_jobs import check_undisturbed, records
from tests.helpers.elastic_ranks import run_jobs
from tests.helpers.sharing import chosen, runs_extended

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


EXTENDED = (
    "sharded: another stage",
    "sharded: the second part",
    "sharded: nothing in advance",
    "sharded: a loss while it connects",
    "vpp2: another rank of the stage",
    "overlap: the same rank",
)
"""Faults whose path another fault also takes."""


def _jobs(*, extended: bool) -> dict[str, Any]:
    wanted = {name: fault for name, fault in FAULTS.items() if extended or name not in EXTENDED}
    jobs = {fault[0]: job([], **REFERENCES[fault[0]]) for fault in wanted.values()}
    for name, (reference, num_parts, faults, _) in wanted.items():
        about = {"nodes.num_spare_nodes": 1, "nodes.num_prebuilt_parts": num_parts}
        made = job(faults, **REFERENCES[reference], **about)
        jobs[name] = {**made, "spares": [4], "num_prebuilt": num_parts, "keepers_live": True, "num_keepers": 5}
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = _jobs(extended=runs_extended(request))
    return run_jobs(jobs, tmp_path_factory.mktemp("prebuilt"), timeout_seconds=580)


@pytest.mark.parametrize("name", chosen(FAULTS, EXTENDED))
def test_undisturbed_bits(outcomes: dict[str, Any], name: str) -> None:
    reference, _, faults, _ = FAULTS[name]
    check_undisturbed(outcomes, name, reference, len(faults))


@pytest.mark.parametrize("name", chosen(FAULTS, EXTENDED))
def test_what_was_built_is_reported(outcomes: dict[str, Any], name: str) -> None:
    _, num_parts, _, expected = FAULTS[name]
    everything = [record for rank in outcomes[name]["ranks"] for record in rank["records"]]
    parts = [record for record in everything if record["kind"] == "part_built" and record["node"] == 4]
    assert len(parts) == num_parts
    assert all(part["state_bytes"] > 0 for part in parts)
    shares = [share for share in records(outcomes, name, "stage_recovery") if share["built"] != "kept"]
    found = [(share["rank"], share["built"]) for share in shares]
    assert set(found) <= set(expected)
    assert found[0] == expected[0] or len(FAULTS[name][2]) > 1
    for share in shares:
        assert bool(share["why_built"]) == (share["built"] == "all")


LAYOUT = {"parallel.pipeline_model_parallel_size": 2, "model.untie_embeddings_and_output_weights": True}
OPTIMIZERS = {
    "sharded": {"parallel.use_distributed_optimizer": True, "precision.params_dtype": "bf16"},
    "overlapped": {"parallel.use_distributed_optimizer": True, "parallel.overlap_grad_reduce": True},
    "whole": {"parallel.use_distributed_optimizer": False},
}


OTHER_OPTIMIZERS = ("overlapped", "whole")


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_scenarios(
        {
            f"{name} {has_moved}": (
                "tests.helpers.prebuilt_scenarios:train",
                4,
                {"overrides": {**LAYOUT, **optimizer}, "has_moved": has_moved},
            )
            for name, optimizer in OPTIMIZERS.items()
            if runs_extended(request) or name not in OTHER_OPTIMIZERS
            for has_moved in (False, True)
        },
        timeout_seconds=400,
    )


@pytest.mark.parametrize("has_moved", [False, True])
@pytest.mark.parametrize("name", chosen(OPTIMIZERS, OTHER_OPTIMIZERS))
def test_an_engine_built_offline_trains_like_any_other(
    trained: dict[str, list[Any]], name: str, has_moved: bool
) -> None:
    for rank in trained[f"{name} {has_moved}"]:
        assert rank["found"] == rank["expected"]
        assert rank["found"]["before"] != rank["found"]["after"]
        assert rank["has_built"] == has_moved


def test_spares_that_die_while_they_build_do_not_disturb_the_job(runs: Path, warm_forkserver: str) -> None:
    """One spare is killed and one fails, each time that it is started."""
    faults = ['kill(node=2,phase="prebuild")', 'raise(node=3,phase="prebuild")']
    job = run_job(
        [
            "model=moe_micro",
            "training.micro_batch_size=1",
            "training.global_batch_size=4",
            "training.train_iterations=60",
            "training.eval_interval_iterations=0",
            "checkpoint.save_at_end=false",
            "telemetry.wandb=disabled",
            "parallel.pipeline_model_parallel_size=2",
            "parallel.use_distributed_optimizer=false",
            "snapshot=sparse_window",
            "snapshot.num_peer_copies=1",
            "snapshot.bandwidth_bytes_per_second=6e6",
            "launch.num_nodes=2",
            "launch.ranks_per_node=1",
            "recovery.keep_layout=true",
            "nodes.num_spare_nodes=2",
            "nodes.restart_lost_nodes=true",
            "nodes.max_node_restarts=1",
            "testing.failpoints=[" + ",".join(f"'{fault}'" for fault in faults) + "]",
        ],
        forkserver=warm_forkserver,
        runs=runs,
        timeout_seconds=200,
    )
    assert job.exit_code == 0, job.output
    assert len(job.losses) == 60
    found = job.records()
    assert {record["node"] for record in found if record["kind"] == "failpoint_hit"} == {2, 3}
    failed = [record for record in found if record["kind"] == "node_start_failed"]
    assert {record["node"] for record in failed} == {2, 3}
    assert not {"membership_changed", "part_built", "rank_failed"} & {record["kind"] for record in found}

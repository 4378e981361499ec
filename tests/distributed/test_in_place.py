"""Tests jobs that keep their layout: only stages that lost a rank replay, and the job ends with the bits of an
undisturbed run."""

from typing import Any

import pytest

from tests.helpers.elastic_jobs import check_undisturbed, records
from tests.helpers.elastic_ranks import run_jobs
from tests.helpers.sharing import chosen, runs_extended
from tests.helpers.state_watch import INCOMING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # trains

UNTIL = 10
KEPT = {
    "recovery.keep_layout": True,
    "recovery.strategies": ["localized_replay"],
    "nodes.restart_lost_nodes": True,
    "placement.algorithm": None,
    "placement.num_slots_per_rank": None,
    "training.train_iterations": UNTIL,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
    "snapshot.policy": {
        "_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow",
    },
    "snapshot.num_peer_copies": 1,
    "snapshot.iteration_seconds": 1.0,
    "snapshot.bandwidth_bytes_per_second": 4e5,
}


def job(faults: list[str], *, nodes: int = 4, **overrides: Any) -> dict[str, Any]:
    return {
        "nodes": nodes,
        "num_keepers": nodes,
        "overrides": {**KEPT, "testing.failpoints": faults, **overrides},
    }


def kill(rank: int, iteration: int, phase: str, generation: int = 0) -> str:
    return f'kill(rank={rank}, at_iteration={iteration}, phase="{phase}", generation={generation})'


PP2 = {"parallel.pipeline_model_parallel_size": 2}
PP4 = {"parallel.pipeline_model_parallel_size": 4, "model.num_layers": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp1": {},
    "pp2": PP2,
    "pp2 tp2": {**PP2, "parallel.tensor_model_parallel_size": 2},
    "pp2 vpp2": {**PP2, "parallel.virtual_pipeline_model_parallel_size": 2, "model.num_layers": 4},
    "pp2 sharded": {
        **PP2,
        "parallel.expert_model_parallel_size": 2,
        "parallel.use_distributed_optimizer": True,
        "precision.params_dtype": "bf16",
    },
    "pp2 overlap": {**PP2, "parallel.overlap_grad_reduce": True, "parallel.expert_model_parallel_size": 2},
    "pp2 global loss": {**PP2, "model.moe_router_load_balancing_type": "global_aux_loss"},
    "pp4": PP4,
}
FAULTS: dict[str, tuple[str, list[str]]] = {
    "pp1: dispatch": ("pp1", [kill(1, 8, "dispatch")]),
    "pp1: while all replay": ("pp1", [kill(1, 8, "dispatch"), kill(2, 7, "forward", 1)]),
    "pp2 overlap: backward": ("pp2 overlap", [kill(1, 8, "backward"), kill(2, 9, "backward", 1)]),
    "pp2: the substitute replays": ("pp2", [kill(0, 8, "forward"), kill(0, 7, "forward", 1)]),
    "pp2: while it replays": ("pp2", [kill(0, 8, "forward"), kill(1, 7, "forward", 1)]),
    "pp2: ranks that serve": ("pp2", [kill(0, 8, "forward"), kill(3, 7, "reform_move", 1)]),
    "pp2: next door": ("pp2", [kill(0, 8, "forward"), kill(3, 8, "grad_sync", 1)]),
    "pp2 tp2: vote_after": ("pp2 tp2", [kill(1, 8, "vote_after")]),
    "pp2 vpp2: backward": ("pp2 vpp2", [kill(2, 8, "backward")]),
    "pp2 sharded: gather": ("pp2 sharded", [kill(1, 8, "gather")]),
    "pp4: apart": ("pp4", [kill(0, 8, "forward"), kill(2, 7, "reform_move", 1)]),
    "pp2 global loss: forward": ("pp2 global loss", [kill(0, 8, "backward")]),
    "pp2: a spare": ("pp2", [kill(1, 8, "forward")]),
    "pp2: a spare for a dead node": ("pp2", [kill(2, 8, "dispatch")]),
    "pp4: the first two": ("pp4", [kill(0, 8, "backward"), kill(1, 7, "reform_move", 1)]),
    "pp4: side by side": ("pp4", [kill(1, 8, "backward"), kill(2, 7, "reform_move", 1)]),
}
"""Layout and faults by name. A fault is (rank, iteration, phase), and the generation if it is not 0."""
EXTENDED = (
    "pp1: dispatch",
    "pp1: while all replay",
    "pp2: the substitute replays",
    "pp2 overlap: backward",
    "pp2 global loss: forward",
    "pp2: ranks that serve",
    "pp2: next door",
    "pp2: a spare",
    "pp2 vpp2: backward",
    "pp4: the first two",
    "pp4: side by side",
)
"""Faults whose path another fault also takes."""
SPARES: dict[str, dict[str, Any]] = {
    "pp2: a spare": {"spares": [4], "keepers_live": True},
    "pp2: a spare for a dead node": {"spares": [4]},
}
REPLAYED = {"pp1: dispatch": {0}, "pp2 tp2: vote_after": {0}, "pp4: apart": {0, 2}, "pp4: the first two": {0, 1}}
"""Stages that replay in the last recovery, by name."""

WATCHED = {
    "pp2 sharded: gather": 1,
    "pp2: while it replays": 1,
    "pp2 vpp2: backward": 2,
    "pp2: the substitute replays": 0,
    "pp2: a spare for a dead node": 2,
}
"""The rank whose substitute builds its model in the last recovery, of each job whose ranks also report the addresses of
their tensors, and what they communicate."""


def _jobs(*, extended: bool) -> dict[str, Any]:
    wanted = {name: fault for name, fault in FAULTS.items() if extended or name not in EXTENDED}
    used = {layout for layout, _ in wanted.values()}
    jobs = {name: job([], **overrides) for name, overrides in LAYOUTS.items() if name in used}
    jobs["too early"] = job([kill(0, 1, "forward")], **PP2)
    for name, (layout, faults) in wanted.items():
        spares = SPARES.get(name, {})
        taken = {"nodes.num_spare_nodes": 1} if spares else {}
        made = {**job(faults, **LAYOUTS[layout], **taken), **spares, "num_keepers": 4 + len(taken)}
        jobs[name] = {**made, "is_watched": name in WATCHED}
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = _jobs(extended=runs_extended(request))
    return run_jobs(jobs, tmp_path_factory.mktemp("in-place"), timeout_seconds=580)


@pytest.mark.parametrize("name", chosen(FAULTS, EXTENDED))
def test_undisturbed_bits(outcomes: dict[str, Any], name: str) -> None:
    reference, faults = FAULTS[name]
    check_undisturbed(outcomes, name, reference, len(faults))
    assert {record["strategy"] for record in records(outcomes, name, "recovery_started")} == {"localized_replay"}


@pytest.mark.parametrize("name", chosen(FAULTS, EXTENDED))
def test_healthy_stages_compute_nothing(outcomes: dict[str, Any], name: str) -> None:
    """Replaying stages run every microbatch since the window exactly once, and healthy stages run none."""
    shares = records(outcomes, name, "stage_recovery")
    last = max(share["generation"] for share in shares)
    assert len([share for share in shares if share["generation"] == last]) == 4
    for share in shares:
        replays = share["role"] == "replays"
        assert (share["num_forward_passes"] > 0) == replays == (share["num_iterations"] > 0)
        assert share["num_iterations"] == share["iteration"] - share["start_iteration"]
    passes = {share["num_forward_passes"] / share["num_iterations"] for share in shares if share["num_iterations"]}
    assert len(passes) == 1


@pytest.mark.parametrize("name", chosen(REPLAYED, EXTENDED))
def test_only_the_stages_that_lost_a_rank_go_back(outcomes: dict[str, Any], name: str) -> None:
    shares = records(outcomes, name, "stage_recovery")
    last = max(share["generation"] for share in shares)
    assert {share["stage"] for share in shares if share["generation"] == last and share["role"] == "replays"} == (
        REPLAYED[name]
    )
    beside = {share["stage"] for share in shares if share["generation"] == last and share["role"] == "serves"}
    expected = {stage for stage in range(4 if "pp4" in name else 2) if {stage - 1, stage + 1} & REPLAYED[name]}
    assert beside == expected - REPLAYED[name] if "pp1" not in name else not beside


def test_a_stage_with_nothing_to_go_back_to_ends_the_job(outcomes: dict[str, Any]) -> None:
    """Before the first window is committed, localized recovery is impossible, and the job reports the reason."""
    errors = [rank["error"] for rank in outcomes["too early"]["ranks"] if rank["error"] is not None]
    assert errors and all("localized_replay: no window has been committed" in error for error in errors)


@pytest.mark.parametrize("name", chosen(WATCHED, EXTENDED))
def test_tensors_of_survivors_stay_where_they_are(outcomes: dict[str, Any], name: str) -> None:
    num_survivors = 0
    for rank in outcomes[name]["ranks"]:
        told = [record for record in rank["records"] if record["kind"] == "addresses"]
        if not told:  # it was lost before its first iteration
            continue
        num_survivors += len({record["generation"] for record in told}) > 1
        # Moments are created by the first update, and the router bias changes its dtype in the first forward pass.
        first = told[1] if told[0]["generation"] == 0 else told[0]
        assert told[-1]["where"] == first["where"]
    assert num_survivors == 4 - len({fault.partition(",")[0] for fault in FAULTS[name][1]})
    shares = records(outcomes, name, "stage_recovery")
    last = max(share["generation"] for share in shares)
    assert {share["rank"] for share in shares if share["generation"] == last and not share["is_kept"]} == {
        WATCHED[name]
    }


@pytest.mark.parametrize("name", chosen(WATCHED, EXTENDED))
def test_ranks_of_healthy_stages_send_their_log_and_receive_nothing(outcomes: dict[str, Any], name: str) -> None:
    shares = {(share["generation"], share["rank"]): share for share in records(outcomes, name, "stage_recovery")}
    told = {(record["generation"], record["rank"]): record for record in records(outcomes, name, "communicated")}
    assert len(told) == 4 * len({generation for generation, _ in told})
    for place, record in told.items():
        moved = record["bytes"]
        if shares[place]["role"] == "replays":
            assert moved["all_to_all_single"] > 0, "it loads a window"
            continue
        assert moved.get("send", 0) == shares[place]["bytes_moved"]
        received = {method for method in INCOMING if moved.get(method, 0)}
        # If an iteration was finished after the failure, the weights of a sharded optimizer are still to be gathered.
        assert received <= (
            {"all_gather_single_coalesced", "allgather_into_tensor_coalesced"} if "gather" in name else set()
        )

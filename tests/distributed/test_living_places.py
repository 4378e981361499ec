"""Tests jobs that keep their layout and have all state on living ranks: processes in the places of lost ranks receive
it, no iteration runs again, and the job ends with the bits of an undisturbed run."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_in_place import KEPT, PP2, PP4, kill
from tests.helpers.elastic_jobs import check_undisturbed, records, write_skewed
from tests.helpers.elastic_ranks import run_jobs
from tests.helpers.sharing import chosen, runs_extended
from tests.helpers.state_watch import INCOMING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # trains

LIVING = {**KEPT, "recovery.strategies": None}
NO_WINDOWS = {"snapshot.policy": None, "snapshot.num_peer_copies": 0}
BF16 = {"precision.params_dtype": "bf16"}
QUANTIZED = {
    "precision.params_dtype": "bf16",
    "precision.fp8": "hybrid",
    "precision.fp8_recipe": "tensorwise",
    "precision.regime": "fp8_fp16_fp32_fp32",
}
"""Optimizer state in several formats, of which some have no scales."""
REPLICAS = {
    "placement.algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"},
    "placement.num_slots_per_rank": None,
    "placement.min_replicas": 2,
}
SEARCH = {"placement.algorithm": {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}}
EAGER = {
    "placement.rebalance_interval_iterations": 2,
    "placement.rebalance_min_gain": 0.0,
    "placement.rebalance_bytes_per_token": 1e12,
}
COPIES = {"parallel.use_distributed_optimizer": True, "placement.state_copies": 2}
LATENT = {
    "model.multi_latent_attention": True,
    "model.qk_layernorm": True,
    "model.kv_lora_rank": 16,
    "model.qk_head_dim": 8,
    "model.qk_pos_emb_head_dim": 4,
    "model.v_head_dim": 10,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {**PP2, **BF16},
    "pp4": {**PP4, "nodes": 8},
    "tp2 ep2": {"parallel.tensor_model_parallel_size": 2, "parallel.expert_model_parallel_size": 2, **LATENT},
    "dropout": {"model.hidden_dropout": 0.1},
    "replicas": {**REPLICAS, **BF16},
    "pp2 copies": {**PP2, **REPLICAS, **BF16, **COPIES, **LATENT},
    "pp2 copies without replicas": {**PP2, **QUANTIZED, **COPIES},
    "dense stage": {**PP2, "parallel.expert_model_parallel_size": 2, "model.moe_first_dense_layers": 1},
    "pp2 ep2 copies without replicas": {**PP2, **COPIES, "parallel.expert_model_parallel_size": 2},
    "rebalanced": {**REPLICAS, **COPIES, **SEARCH, **EAGER},
    "rebuilt": {**REPLICAS, **BF16, **COPIES, **EAGER, "placement.num_slots_per_rank": 3, "skewed": True},
}
FAULTS: dict[str, tuple[str, list[str]]] = {
    "pp2: in three iterations": (
        "pp2",
        [kill(0, 1, "forward"), kill(2, 6, "vote_after", 1), kill(3, 8, "update", 2), kill(1, 9, "gather", 3)],
    ),
    "pp2: in recoveries": (
        "pp2",
        [kill(1, 8, "backward"), kill(2, 7, "reform_move", 1), kill(1, 7, "reform_move", 2)],
    ),
    "pp2: the sender": ("pp2", [kill(1, 8, "backward"), kill(0, 7, "reform_move", 1)]),
    "pp2: no windows": ("pp2", [kill(1, 4, "forward"), kill(3, 7, "gather", 1)]),
    "pp4: beside a replay": (
        "pp4",
        [kill(0, 8, "forward"), kill(1, 7, "reform_move", 1), kill(2, 7, "reform_move", 2)],
    ),
    "tp2 ep2: twice": ("tp2 ep2", [kill(3, 5, "grad_sync"), kill(0, 8, "backward", 1)]),
    "dropout: forward": ("dropout", [kill(1, 8, "forward")]),
    "replicas: all copies": (
        "replicas",
        [kill(2, 5, "dispatch"), kill(1, 8, "vote_after", 1), kill(0, 8, "reform_move", 2)],
    ),
    "pp2 copies: a stage": (
        "pp2 copies",
        [kill(2, 7, "gather"), kill(3, 7, "reform_move", 1), kill(2, 9, "forward", 2), kill(1, 10, "grad_sync", 3)],
    ),
    "pp2 copies without replicas: in phases": (
        "pp2 copies without replicas",
        [
            kill(0, 1, "forward"),
            kill(2, 5, "vote_after", 1),
            kill(3, 7, "update", 2),
            kill(1, 8, "gather", 3),
            kill(3, 8, "reform_move", 4),
        ],
    ),
    "dense stage: without experts": ("dense stage", [kill(0, 5, "forward")]),
    "pp2 ep2 copies without replicas: in phases": (
        "pp2 ep2 copies without replicas",
        [kill(3, 5, "grad_sync"), kill(0, 7, "gather", 1), kill(1, 8, "vote_inside", 2)],
    ),
    "rebalanced: moving": (
        "rebalanced",
        [kill(2, 5, "migrate_step"), kill(1, 5, "migrate", 1), kill(3, 7, "forward", 2), kill(1, 8, "vote_inside", 3)],
    ),
    "rebuilt: moving": ("rebuilt", [kill(2, 3, "migrate_build"), kill(1, 3, "forward", 1)]),
}
"""Layout and faults by name."""
EXTENDED = (
    "pp2: in recoveries",
    "pp2: no windows",
    "pp2: the sender",
    "pp4: beside a replay",
    "tp2 ep2: twice",
    "replicas: all copies",
    "pp2 ep2 copies without replicas: in phases",
    "rebalanced: moving",
    "rebuilt: moving",
)
"""Faults whose path another fault also takes."""
SERVED = {
    "pp2: the sender": ["living_state", "localized_replay"],
    "pp4: beside a replay": ["living_state", "localized_replay", "localized_replay"],
    "dropout: forward": ["localized_replay"],
    "replicas: all copies": ["living_state", "living_state", "localized_replay"],
    "pp2 copies: a stage": ["living_state", "localized_replay", "living_state", "living_state"],
}
"""Strategies of the jobs in which living state does not serve every loss."""
WHY = {
    "pp2: the sender": "stage 0: no living rank has the non-expert state of pipeline stage 0, tensor part 0 and 1 more",
    "pp4: beside a replay": "stage 1: the upstream log of rank 2 lacks iterations",
    "dropout: forward": "rank 0 has drawn random numbers since its model was built",
    "replicas: all copies": "stage 0: no living rank has expert 0 of layer 1",
}
"""Part of the reason for which the last recovery replays."""
GATHERING = ("pp2 copies without replicas: in phases", "pp2 ep2 copies without replicas: in phases")
"""Faults after which ranks may gather weights that are rounded from the master weights: a rank finished an iteration
after the failure, which depends on the moment of the failure, or no living rank has the experts of the lost rank."""


def _jobs(folder: Path, *, extended: bool) -> dict[str, Any]:
    made, skewed = {}, write_skewed(folder)
    wanted = {name: fault for name, fault in FAULTS.items() if extended or name not in EXTENDED}
    references: dict[str, tuple[str, list[str]]] = {layout: (layout, []) for layout, _ in wanted.values()}
    for name, (layout, faults) in {**references, **wanted}.items():
        keys = {**LIVING, **LAYOUTS[layout], "testing.failpoints": faults}
        keys |= NO_WINDOWS if "no windows" in name else {}
        nodes = keys.pop("nodes", 4)
        keys |= skewed if keys.pop("skewed", False) else {}
        has_windows = keys["snapshot.policy"] is not None
        made[name] = {"nodes": nodes, "num_keepers": nodes * has_windows, "overrides": keys, "is_watched": True}
    return made


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("living-places")
    return run_jobs(_jobs(folder, extended=runs_extended(request)), folder, timeout_seconds=880)


@pytest.mark.parametrize("name", chosen(FAULTS, EXTENDED))
def test_undisturbed_bits(outcomes: dict[str, Any], name: str) -> None:
    reference, faults = FAULTS[name]
    check_undisturbed(outcomes, name, reference, len(faults))


@pytest.mark.parametrize("name", chosen(FAULTS, EXTENDED))
def test_living_state_serves_while_it_can(outcomes: dict[str, Any], name: str) -> None:
    started = sorted(records(outcomes, name, "recovery_started"), key=lambda record: record["generation"])
    assert [record["strategy"] for record in started] == SERVED.get(name, ["living_state"] * len(FAULTS[name][1]))
    assert WHY.get(name, "") in "; ".join(started[-1].get("declined", ()))


@pytest.mark.parametrize("name", chosen(sorted(set(FAULTS) - set(SERVED)), EXTENDED))
def test_nothing_runs_again(outcomes: dict[str, Any], name: str) -> None:
    shares = records(outcomes, name, "stage_recovery")
    assert shares and not any(share["num_forward_passes"] or share["num_iterations"] for share in shares)
    last = max(share["generation"] for share in shares)
    roles = {share["rank"]: share["role"] for share in shares if share["generation"] == last}
    assert "receives" in roles.values() and "serves" in roles.values()


@pytest.mark.parametrize("name", chosen([name for name in FAULTS if name.startswith(("pp", "tp"))], EXTENDED))
def test_only_joining_ranks_receive(outcomes: dict[str, Any], name: str) -> None:
    """All other ranks keep their tensors at the same addresses, and receive nothing."""
    shares = {(share["generation"], share["rank"]): share for share in records(outcomes, name, "stage_recovery")}
    replayed = {generation for (generation, _), share in shares.items() if share["role"] == "replays"}
    told = {(found["generation"], found["rank"]): found["bytes"] for found in records(outcomes, name, "communicated")}
    for (generation, rank), moved in told.items():
        if generation in replayed:
            continue
        share, received = shares[generation, rank], sum(moved.get(method, 0) for method in INCOMING)
        receives = share["role"] == "receives"
        if name in GATHERING and not receives:
            assert received < share["state_bytes"] / 2, "more than weights"
        else:
            assert (received > 0) == receives
        if receives:
            # Joining ranks also receive the copies that they keep for other ranks.
            assert (received > share["bytes_moved"]) == ("copies" in name)
    sent = [
        share["bytes_moved"]
        for (made, _), share in shares.items()
        if share["role"] == "serves" and made not in replayed
    ]
    assert sum(sent) == sum(share["bytes_moved"] for share in shares.values() if share["role"] == "receives")
    for outcome in outcomes[name]["ranks"]:
        where = [record for record in outcome["records"] if record["kind"] == "addresses"]
        if where:
            # Moments are created by the first update, and the router bias changes its dtype in the first forward pass.
            first = where[1] if where[0]["generation"] == 0 and len(where) > 1 else where[0]
            assert where[-1]["where"] == first["where"]

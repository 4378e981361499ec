"""Tests keys for lost nodes: which values are refused by name, and which are accepted."""

from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of
from megatron_ft.config.serialize import from_dict
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError

SEARCH = {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}
POLICY = {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"}
LOSE_ONE = ["lose(nodes=[2],before_iteration=5)"]


def job(changes: dict[str, Any]) -> JobConfig:
    """Return three nodes of two ranks with replica slots and an unsharded optimizer, with dotted keys changed."""
    values: dict[str, Any] = {
        "launch": {"num_nodes": 3, "ranks_per_node": 2},
        "parallel": {"use_distributed_optimizer": False},
        "placement": {"algorithm": SEARCH, "num_slots_per_rank": 4},
        "training": {"train_iterations": 10},
    }
    for key, value in changes.items():
        group, name = key.split(".")
        values.setdefault(group, {})[name] = value
    return from_dict(values)


UNCOVERED: list[tuple[dict[str, Any], str]] = [
    ({"launch.mode": "torchrun"}, "launch.mode"),
    ({"launch.master_port": 20001}, "launch.master_port"),
    ({"parallel.use_distributed_optimizer": True}, "parallel.use_distributed_optimizer"),
    ({"placement.algorithm": None, "placement.num_slots_per_rank": None}, "placement.algorithm"),
    ({"placement.schedule": ["3:plan.json"]}, "placement.schedule"),
    ({"placement.state_copies": 2}, "placement.state_copies"),
    ({"recovery.keep_processes": False}, "recovery.keep_processes"),
    ({"training.device": "cuda"}, "training.device"),
]


ASKED = [{"recovery.min_nodes": 1}, {"testing.membership_schedule": LOSE_ONE}, {"nodes.max_nodes": 4}]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize(("changes", "key"), UNCOVERED, ids=[key for _, key in UNCOVERED])
def test_what_is_not_covered_is_refused_by_key(asked: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    validate(job(changes | {"model.num_layers": 6}))
    with pytest.raises(ConfigError, match=rf"^{key}.*must be.*(\.min_nodes=1|\.max_nodes=4|\.membership_schedule)"):
        validate(job(changes | asked | {"model.num_layers": 6}))


PIPELINE = {"model.num_layers": 6, "parallel.pipeline_model_parallel_size": 2, "placement.num_slots_per_rank": 8}


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_pipelines_and_tensor_parallelism_are_covered(asked: dict[str, Any]) -> None:
    validate(job(PIPELINE | asked))
    tensor = {"parallel.tensor_model_parallel_size": 2, "launch.num_nodes": 4, "launch.ranks_per_node": 2}
    more = {"nodes.max_nodes": 5} if "nodes.max_nodes" in asked else asked
    wide = {"recovery.min_nodes": 2} if "recovery.min_nodes" in asked else more
    validate(job(PIPELINE | tensor | wide))


def test_the_fewest_nodes_must_have_a_model_replica_with_slots_for_all_experts() -> None:
    narrow = PIPELINE | {"launch.ranks_per_node": 1, "launch.num_nodes": 4}
    validate(job(narrow | {"recovery.min_nodes": 2}))
    with pytest.raises(
        ConfigError,
        match=r"^recovery\.min_nodes=1: must leave at least 2 ranks, because one model replica has TP",
    ):
        validate(job(narrow | {"recovery.min_nodes": 1}))
    with pytest.raises(
        ConfigError,
        match=r"^placement\.num_slots_per_rank=4: must be large enough .* only 4 slots \(.* of a pipeline stage: 1\)$",
    ):
        validate(job(narrow | {"recovery.min_nodes": 2, "placement.num_slots_per_rank": 4}))


WHY: list[tuple[dict[str, Any], str]] = [
    ({"recovery.min_nodes": 1, "nodes.max_nodes": 5, "nodes.num_spare_nodes": 1}, "recovery.min_nodes=1"),
    ({"nodes.max_nodes": 5, "nodes.num_spare_nodes": 1}, "nodes.max_nodes=5"),
    ({"recovery.min_nodes": 3, "nodes.num_spare_nodes": 1}, "nodes.num_spare_nodes=1"),
    ({"nodes.num_spare_nodes": 1}, "nodes.num_spare_nodes=1"),
]


@pytest.mark.parametrize(("asked", "why"), WHY, ids=str)
@pytest.mark.parametrize(
    "changes", [{"launch.mode": "torchrun"}, {"testing.membership_schedule": LOSE_ONE}], ids=["torchrun", "a script"]
)
def test_a_refusal_names_the_key_that_asked_for_it(asked: dict[str, Any], why: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(changes))}=.* must be .*with {why}(:|;|$)"):
        validate(job(asked | changes))


DOMAINS: list[tuple[dict[str, Any], str]] = [
    ({}, "launch.num_nodes=3"),
    ({"nodes.num_spare_nodes": 1}, "launch.num_nodes=3 and nodes.num_spare_nodes=1"),
    ({"nodes.num_spare_nodes": 1, "nodes.max_nodes": 5}, "nodes.max_nodes=5"),
]


@pytest.mark.parametrize(("asked", "nodes"), DOMAINS, ids=str)
def test_a_domain_is_missing_of_nodes_that_some_key_gives(asked: dict[str, Any], nodes: str) -> None:
    with pytest.raises(ConfigError, match=rf"^topology\.failure_domains=.* one for each node \({nodes}\), or be empty"):
        validate(job({**asked, "topology.failure_domains": ["a", "b"]}))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"recovery.min_nodes": 0}, "recovery.min_nodes"),
    ({"recovery.min_nodes": 4}, "recovery.min_nodes"),
    ({"recovery.min_nodes": 1, "placement.num_slots_per_rank": 2}, "placement.num_slots_per_rank"),
    ({"recovery.min_nodes": 1, "placement.num_slots_per_rank": None}, "placement.num_slots_per_rank"),
    (
        {"recovery.min_nodes": 1, "placement.algorithm": {**SEARCH, "objective": {"failure_rates": [0.1, 0.2, 0.1]}}},
        "placement.algorithm.objective.failure_rates",
    ),
    ({"testing.membership_schedule": LOSE_ONE, "recovery.max_restarts": 1}, "recovery.max_restarts"),
    ({"recovery.reconfigure_timeout_seconds": 0.0}, "recovery.reconfigure_timeout_seconds"),
    *(
        ({"testing.membership_schedule": schedule}, "testing.membership_schedule")
        for schedule in (
            ["lose(2)"],
            ["lose(nodes=[3],before_iteration=5)"],
            ["lose(nodes=[0,1,2],before_iteration=5)"],
            ["lose(nodes=[0,1],before_iteration=5)", "lose(nodes=[2],before_iteration=6)"],
            ["lose(nodes=[1],before_iteration=5)", "lose(nodes=[1],before_iteration=6)"],
            ["lose(nodes=[1],before_iteration=5)", "lose(nodes=[2],before_iteration=4)"],
            ["join(nodes=[1],before_iteration=5)"],
            [*LOSE_ONE, "change(lose=[0,1],join=[2],before_iteration=7)"],
            ["change(lose=[0,1,2],join=[0,1],before_iteration=5)"],
            ["lose(nodes=[1],before_iteration=5)", "join(nodes=[1,2],before_iteration=6)"],
            ["lose(nodes=[0,1],before_iteration=5)", "change(lose=[2],join=[0],before_iteration=6)"],
            ["lose(nodes=[1],before_iteration=11)"],
        )
    ),
    ({"testing.membership_schedule": LOSE_ONE, "recovery.min_nodes": 2}, "testing.membership_schedule"),
    ({"nodes.max_nodes": 2}, "nodes.max_nodes"),
    ({"nodes.max_nodes": 3, "nodes.num_spare_nodes": 1}, "nodes.max_nodes"),
    ({"nodes.num_spare_nodes": -1}, "nodes.num_spare_nodes"),
    ({"nodes.join_window_seconds": -1.0}, "nodes.join_window_seconds"),
    ({"nodes.restart_lost_nodes": True}, "nodes.restart_lost_nodes"),
    ({"nodes.max_nodes": 4, "topology.failure_domains": ["a", "b", "c"]}, "topology.failure_domains"),
    ({"nodes.num_spare_nodes": 1, "placement.num_slots_per_rank": 1}, "placement.num_slots_per_rank"),
    ({"detector.heartbeat_interval_seconds": 0.0}, "detector.heartbeat_interval_seconds"),
    ({"detector.heartbeat_timeout_seconds": 1.9}, "detector.heartbeat_timeout_seconds"),
    ({"detector.vanished_seconds": 0.9}, "detector.vanished_seconds"),
    ({"snapshot.policy": POLICY, "snapshot.outlive_job_seconds": -1}, "snapshot.outlive_job_seconds"),
    ({"snapshot.policy": POLICY, "snapshot.outlive_job_seconds": 604801}, "snapshot.outlive_job_seconds"),
    ({"snapshot.outlive_job_seconds": 60}, "snapshot.outlive_job_seconds"),
    (
        {"snapshot.policy": POLICY, "snapshot.outlive_job_seconds": 60, "launch.node_launcher": "srun"},
        "snapshot.outlive_job_seconds",
    ),
    ({"detector.vanished_seconds": 10.0}, "detector.vanished_seconds"),
    ({"detector.heartbeat_timeout_seconds": 2.0}, "detector.vanished_seconds"),
    ({"detector.hang_seconds": 0.0}, "detector.hang_seconds"),
]


BUBBLES = {**PIPELINE, "snapshot.policy": POLICY, "snapshot.copy_in_bubbles": True}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel.pipeline_model_parallel_size": 1}, "there is only one stage"),
        ({"snapshot.policy": None}, "there are no snapshots to copy"),
        ({"training.device": "cuda"}, "a CUDA stream waits for the messages"),
    ],
)
def test_copies_in_bubbles_need_bubbles(changes: dict[str, Any], reason: str) -> None:
    validate(job(BUBBLES))
    with pytest.raises(ConfigError, match=rf"^snapshot\.copy_in_bubbles=true: must be false.*{reason}"):
        validate(job(BUBBLES | changes))


@pytest.mark.parametrize(("changes", "key"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_what_cannot_be_is_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}.*must"):
        validate(job(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"recovery.min_nodes": 1},
        {
            "recovery.min_nodes": 3,
            "snapshot.policy": POLICY,
            "placement.algorithm": None,
            "placement.num_slots_per_rank": None,
        },
        {"testing.membership_schedule": [*LOSE_ONE, "lose(nodes=[0],before_iteration=10)"]},
        {"testing.membership_schedule": LOSE_ONE, "recovery.min_nodes": 3},
        {"testing.membership_schedule": [*LOSE_ONE, "change(lose=[0],join=[2],before_iteration=5)"]},
        {"recovery.min_nodes": 1, "testing.failpoints": ['kill(generation=2, phase="forward")']},
        {"recovery.min_nodes": 1, "snapshot.policy": POLICY},
        {
            "testing.membership_schedule": [
                *LOSE_ONE,
                "join(nodes=[2],before_iteration=7)",
                "lose(nodes=[0,1],before_iteration=8)",
            ]
        },
        {"testing.membership_schedule": [*LOSE_ONE, "change(lose=[],join=[],before_iteration=7)"]},
        {"testing.membership_schedule": ["change(lose=[0,1],join=[0],before_iteration=5)"]},
        {
            "testing.membership_schedule": [
                *LOSE_ONE,
                "join(nodes=[2],before_iteration=7)",
                "lose(nodes=[0,1],before_iteration=7)",
            ]
        },
        {"nodes.max_nodes": 4, "testing.failpoints": ['kill(node=3, rank=7, generation=9, phase="forward")']},
        {"recovery.min_nodes": 1, "nodes.num_spare_nodes": 2, "topology.failure_domains": ["a", "b", "c", "d", "e"]},
        {"recovery.min_nodes": 2, "nodes.restart_lost_nodes": True},
        {"detector.hang_seconds": None},
    ],
    ids=str,
)
def test_what_can_be_passes(changes: dict[str, Any]) -> None:
    validate(job(changes))


def test_a_failpoint_names_a_generation_that_losses_can_reach() -> None:
    fault = {"testing.failpoints": ['kill(generation=2, phase="forward")']}
    with pytest.raises(ConfigError, match=r"testing\.failpoints.*recovery\.min_nodes"):
        validate(job(fault | {"recovery.min_nodes": 2}))


KEEP: dict[str, Any] = {
    "recovery.keep_layout": True,
    "nodes.num_spare_nodes": 1,
    "snapshot.policy": POLICY,
    "placement.algorithm": None,
    "placement.num_slots_per_rank": None,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recovery.min_nodes": 3, "recovery.max_restarts": 2},
        {"nodes.num_spare_nodes": 0, "nodes.restart_lost_nodes": True},
        {"model.num_layers": 6, "parallel.pipeline_model_parallel_size": 3, "parallel.tensor_model_parallel_size": 2},
        {"parallel.use_distributed_optimizer": True},
        {"testing.failpoints": ['kill(generation=7, phase="forward")']},
        {"snapshot.policy": None, "recovery.strategies": ["living_state"]},
        {
            "placement.algorithm": SEARCH,
            "placement.num_slots_per_rank": 4,
            "placement.state_copies": 2,
            "parallel.use_distributed_optimizer": True,
        },
    ],
    ids=str,
)
def test_a_layout_is_kept_with_every_kind_of_parallelism(changes: dict[str, Any]) -> None:
    config = job(KEEP | changes)
    validate(config)
    assert config.may_lose_nodes
    if config.recovery.strategies is not None:
        return  # these strategies keep processes
    for restarted in ({"recovery.keep_processes": False}, {"training.device": "cuda"}):
        config = job(KEEP | {"recovery.max_restarts": 2} | changes | restarted)
        validate(config)
        assert config.may_change_nodes and not config.may_lose_nodes


def test_a_kept_layout_may_change_if_a_place_stays_empty() -> None:
    """The configuration of a membership says whether its layout is kept."""
    replicas = {"placement.algorithm": SEARCH, "placement.num_slots_per_rank": 4, "recovery.min_nodes": 2}
    config = job(KEEP | replicas)
    validate(config)
    assert config.may_change_layout and not job(KEEP).may_change_layout
    kept, fewer = config_of(config, (0, 0, 3, 3, 2, 2)), config_of(config, (0, 0, 2, 2))
    assert kept.recovery.keep_layout and kept.replays_stages and kept.member_domains == ["node0", "node3", "node2"]
    assert not fewer.recovery.keep_layout and not fewer.replays_stages
    assert not config_of(config, (0, 0, 3, 3, 2, 2), keeps_layout=False).replays_stages
    with pytest.raises(ConfigError, match=r"recovery.min_nodes=2: must be null with recovery.strategies=.localized"):
        validate(job(KEEP | replicas | {"recovery.strategies": ["localized_replay"]}))


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        (
            {"recovery.min_nodes": 2},
            "placement.algorithm",
            "without replica slots, only a whole expert-parallel group can leave a job",
        ),
        (
            {"recovery.min_nodes": 2, "parallel.expert_model_parallel_size": 2, "launch.ranks_per_node": 1}
            | {"parallel.pipeline_model_parallel_size": 2, "launch.num_nodes": 4, "model.num_layers": 4},
            "placement.algorithm",
            "no remaining rank has a place for the experts",
        ),
        ({"nodes.max_nodes": 5}, "nodes.max_nodes", "cannot use additional nodes"),
        ({"nodes.num_spare_nodes": 0}, "recovery.keep_layout", "needs nodes that replace lost nodes"),
        (
            {"nodes.num_spare_nodes": 0, "nodes.restart_lost_nodes": True, "nodes.max_node_restarts": 0},
            "recovery.keep_layout",
            "nodes.max_node_restarts=0",
        ),
        ({"launch.mode": "torchrun"}, "snapshot.policy", "launch.mode"),
        ({"launch.master_port": 20001}, "launch.master_port", "must be 0"),
        ({"testing.membership_schedule": LOSE_ONE}, "testing.membership_schedule", "recovery.keep_layout=true"),
        ({"training.device": "cuda"}, "recovery.max_restarts", "must be above 0"),
        ({"recovery.keep_processes": False}, "recovery.max_restarts", "must be above 0"),
        ({"training.device": "cuda", "recovery.keep_processes": True}, "recovery.keep_processes", "must be false"),
        (
            {"snapshot.policy": None, "recovery.strategies": ["localized_replay"]},
            "snapshot.policy",
            "a replay starts from a snapshot",
        ),
        (
            {"snapshot.policy": None, "recovery.keep_processes": False, "recovery.max_restarts": 2},
            "snapshot.policy",
            "all ranks restart from a snapshot after a loss",
        ),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_kept_is_refused_by_key(changes: dict[str, Any], key: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}.*{why}"):
        validate(job(KEEP | changes))


ELASTIC = {"recovery.min_nodes": 2, "model.num_layers": 6}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recovery.strategies": []}, r"recovery\.strategies=\[\]: must be null or name at least one of living_state,"),
        ({"recovery.strategies": ["replicas"]}, r"recovery\.strategies=replicas: is now called living_state$"),
        ({"recovery.strategies": ["window"]}, r"recovery\.strategies=window: is now called rollback$"),
        ({"recovery.strategies": ["chekpoint"]}, r"must be one of living_state, .*did you mean 'checkpoint'"),
        ({"recovery.strategies": ["checkpoint", "checkpoint"]}, "must name each strategy once"),
        ({"recovery.strategies": ["rollback"]}, r"snapshot\.policy=null: must be given with .*\[rollback\]"),
        (
            {"recovery.strategies": ["living_state"]},
            r"recovery\.min_nodes=null: must be below launch\.num_nodes=3 with",
        ),
        (
            {"recovery.strategies": ["living_state"], **ELASTIC, "recovery.max_restarts": 1},
            r"recovery\.max_restarts=1: must be 0 with recovery\.strategies=\[living_state\]",
        ),
        (
            {"recovery.strategies": ["checkpoint"], **ELASTIC},
            r"recovery\.min_nodes=2: must be null with .*recovery\.max_restarts=0: without living_state",
        ),
        (
            {
                "recovery.strategies": ["checkpoint"],
                **ELASTIC,
                "recovery.max_restarts": 1,
                "nodes.num_spare_nodes": 1,
            },
            r"nodes\.num_spare_nodes=1: must be 0 with recovery\.strategies=\[checkpoint\]",
        ),
    ],
    ids=str,
)
def test_strategies_are_known_and_possible(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(job(changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"recovery.strategies": ["checkpoint"]},
            r"recovery\.keep_layout=true: must be false with recovery\.strategies=\[checkpoint\]",
        ),
        (
            {"recovery.strategies": ["rollback"], "recovery.keep_processes": True},
            r"recovery\.keep_processes=true: must be null or false with .*: "
            "none of these strategies lets ranks continue in their processes",
        ),
        (
            {"recovery.strategies": ["rollback"], "recovery.max_restarts": 0},
            r"recovery\.max_restarts=0: must be above 0 with recovery\.keep_layout=true",
        ),
        (
            {"recovery.strategies": ["localized_replay"], "recovery.max_restarts": 0, "training.device": "cuda"},
            r"training\.device=cuda: must be cpu with recovery\.strategies=\[localized_replay\]",
        ),
        (
            {"recovery.strategies": ["localized_replay", "rollback"], "recovery.keep_processes": False},
            r"recovery\.keep_processes=false: must be true or null with recovery\.strategies",
        ),
    ],
    ids=str,
)
def test_strategies_fit_the_processes_that_a_kept_layout_keeps(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(job(KEEP | {"recovery.max_restarts": 2} | changes))


def test_a_layout_can_be_kept_by_rollback_alone() -> None:
    for device in ("cpu", "cuda"):
        chosen = {"recovery.strategies": ["rollback"], "recovery.max_restarts": 2, "training.device": device}
        config = job(KEEP | chosen)
        validate(config)
        assert config.may_change_nodes and not config.keeps_processes and not config.replays_stages
    every = job(KEEP | {"recovery.strategies": ["rollback", "localized_replay"], "recovery.max_restarts": 2})
    validate(every)
    assert every.keeps_processes and every.replays_stages


def test_only_chosen_strategies_keep_processes() -> None:
    chosen = {"recovery.strategies": ["checkpoint"], **ELASTIC, "recovery.max_restarts": 1}
    config = job(chosen)
    validate(config)
    assert config.may_change_nodes and not config.keeps_processes and not config.may_lose_nodes
    every = job({**chosen, "recovery.strategies": ["checkpoint", "living_state"]})
    validate(every)
    assert every.may_lose_nodes and job(ELASTIC).may_lose_nodes

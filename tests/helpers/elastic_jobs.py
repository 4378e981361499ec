"""Builds the specifications of jobs whose nodes are lost and join, and reads their outcomes."""

import json
from pathlib import Path
from typing import Any

from megatron_ft.telemetry.metrics import METRICS

BIASED = {"model.moe_router_score_function": "sigmoid", "model.moe_router_enable_expert_bias": True}
SKEWED = [[90.0, 5.0, 3.0, 2.0]] * 2
"""Initial loads of both layers. Measured loads therefore require another placement."""
SCARCE = {"placement.num_slots_per_rank": 2, "placement.min_replicas": 1}
"""Slots with which some experts have only one copy if loads are skewed."""
SAVING = {"checkpoint.save_interval_iterations": 2, "checkpoint.keep_last": 5}
GROWN = ("lose(nodes=[2],before_iteration=3)", "join(nodes=[2],before_iteration=5)")


def lose(*losses: tuple[int, int]) -> dict[str, Any]:
    """Return a schedule entry in which nodes leave."""
    return {"testing.membership_schedule": [f"lose(nodes=[{node}],before_iteration={k})" for node, k in losses]}


def script(*entries: str) -> dict[str, Any]:
    """Return the overrides of a membership schedule."""
    return {"testing.membership_schedule": list(entries)}


def repeats(name: str) -> dict[str, Any]:
    """Return the schedule that repeats the memberships of an earlier job of the same run without faults."""
    return {"repeats": name}


def faults(*specs: str) -> dict[str, Any]:
    """Return the overrides with failpoints."""
    return {"recovery.min_nodes": 2, "testing.failpoints": list(specs)}


def kill(rank: int, iteration: int, phase: str) -> str:
    """Return a failpoint that kills a rank."""
    return f'kill(rank={rank}, at_iteration={iteration}, phase="{phase}")'


def write_skewed(folder: Path) -> dict[str, Any]:
    """Write skewed initial loads, and return the overrides that use them."""
    path = folder / "loads.json"
    path.write_text(json.dumps(SKEWED))
    return {"placement.loads_file": str(path)}


def job(overrides: dict[str, Any], *, nodes: int = 4, until: int = 4, **more: Any) -> dict[str, Any]:
    """Return the arguments of ``elastic_ranks.run_jobs`` for one job."""
    return {"nodes": nodes, "overrides": {**BIASED, "training.train_iterations": until, **overrides}, **more}


def fresh(folder: Path, name: str, nodes: tuple[int, ...], loaded: int, **overrides: Any) -> dict[str, Any]:
    """Return a job of ``nodes`` only, which starts from the checkpoint of iteration ``loaded`` of job ``name`` with its
    placement."""
    return job(
        {
            "training.exit_at_iteration": loaded + 2,
            "topology.failure_domains": [f"node{node}" for node in nodes],
            "checkpoint.load": str(folder / name / "checkpoints" / f"iter_{loaded:07d}"),
            "placement.schedule": [f"{loaded + 1}:{folder}/{name}/placements/iter_{loaded + 1:07d}.json"],
            **overrides,
        },
        nodes=len(nodes),
        until=6,
    )


def records(outcomes: dict[str, Any], name: str, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind that a job's ranks reported, in the order of iterations."""
    outcome = outcomes[name]
    assert "error" not in outcome, f"{name}: {outcome['error']}"
    found = [record for rank in outcome["ranks"] for record in rank["records"] if record["kind"] == kind]
    return sorted(found, key=lambda record: (record["iteration"], record["number"]))


def digests(outcomes: dict[str, Any], name: str) -> dict[int, list[str]]:
    """Return the digest of each rank's state after each iteration, as reported last."""
    return {record["iteration"]: record["digests"] for record in records(outcomes, name, "state_digest")}


def figures(outcomes: dict[str, Any], name: str) -> dict[int, dict[str, Any]]:
    """Return the metrics by iteration, without metrics that depend on the clock."""
    timed = {metric.name for metric in METRICS.values() if metric.is_timed} | {"time_unix_seconds", "number"}
    return {
        record["iteration"]: {key: value for key, value in record.items() if key not in timed}
        for record in records(outcomes, name, "metrics")
    }


def check_same(outcomes: dict[str, Any], faulty: str, scripted: str) -> None:
    """Compare states and figures of all iterations bit by bit.

    If a rank had not reported its digest of a target before the loss, it reports the digest with the ranks and
    placement after the loss. In this case the state is compared in the next iteration.
    """
    targets = {target["iteration"] for target in outcomes[faulty]["targets"]}
    expected, found = digests(outcomes, scripted), digests(outcomes, faulty)
    last = max(expected)
    assert max(targets) < last and expected.keys() == found.keys()
    assert {k: found[k] for k in found if k not in targets} == {k: expected[k] for k in expected if k not in targets}
    assert figures(outcomes, faulty) == figures(outcomes, scripted)


def check_undisturbed(outcomes: dict[str, Any], name: str, reference: str, num_faults: int) -> None:
    """Assert that all faults of a job have happened, and that its losses and the state of every rank after every
    iteration are those of job ``reference``, which had none."""
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert len(records(outcomes, name, "failpoint_hit")) == num_faults
    assert digests(outcomes, name) == digests(outcomes, reference)
    assert figures(outcomes, name) == figures(outcomes, reference)


def memberships(outcomes: dict[str, Any], name: str) -> list[tuple[int, list[int], int]]:
    """Return (generation, nodes, iteration after which it begins) of each later membership."""
    changed = records(outcomes, name, "membership_changed")
    return [(record["generation"], record["nodes"], record["iteration"]) for record in changed]


def schedules(outcomes: dict[str, Any], name: str) -> list[list[str]]:
    """Return the schedule entries that would repeat each later membership since the last commit."""
    return [record["schedule"] for record in records(outcomes, name, "membership_changed")]


def check_like_fresh(outcomes: dict[str, Any], name: str, fresh: str, nodes: tuple[int, ...], loaded: int) -> None:
    """Compare states and figures of the next two iterations bit by bit."""
    expected, found = digests(outcomes, fresh), digests(outcomes, name)
    for iteration in (loaded + 1, loaded + 2):
        assert len(found[iteration]) == len(nodes) and found[iteration] == expected[iteration]
        assert figures(outcomes, name)[iteration] == figures(outcomes, fresh)[iteration]

"""Tests how ``fallback-order`` plans its losses and judges their records."""

from typing import Any

import pytest

from benchmarks.fallback_order import MIN_TRIALS, _in_time, _outcome, jobs_of

SERVED: dict[str, Any] = {
    "kind": "node",
    "named": ["rollback", "memory"],
    "served": ["rollback", "memory"],
    "proven": True,
    "predicted_seconds": 2.0,
    "seconds": 2.9,
    "load": 0.5,
}
ALL_KINDS = {
    "rank",
    "node",
    "two nodes",
    "all copies of an expert",
    "all copies of a shard",
    "a stage",
    "all ranks",
    "all processes",
}


def test_the_campaign_has_enough_losses_of_each_kind() -> None:
    jobs = jobs_of(quick=False)
    losses = [kind for job in jobs for kind in job.losses]
    assert len(losses) >= MIN_TRIALS and set(losses) == ALL_KINDS
    assert [job.number for job in jobs] == list(range(len(jobs)))


def test_a_loss_passes_if_the_named_strategy_has_served() -> None:
    assert _outcome(SERVED, [], 10).passed
    assert not _outcome({**SERVED, "served": ["rollback", "persisted"]}, [], 10).passed
    assert not _outcome(SERVED, ["loss of iteration 3"], 10).passed
    assert not _outcome({"kind": "node", "proven": True, "problem": "it has ended"}, [], 10).passed
    assert not _outcome({**SERVED, "proven": False}, [], 10).proven


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 1)),
        ({"seconds": 3.1}, (0, 1)),
        ({"seconds": 1.3}, (0, 1)),
        ({"load": 2.1}, (0, 0)),
        ({"predicted_seconds": None}, (0, 0)),
    ],
)
def test_times_are_judged_by_the_factor_on_a_quiet_machine(changes: dict[str, Any], expected: tuple[int, int]) -> None:
    assert _in_time([_outcome({**SERVED, **changes}, [], 10)]) == expected

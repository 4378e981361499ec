"""Tests the memberships of a schedule, and schedules that are impossible."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config.membership import MembershipChange
from megatron_ft.errors import ConfigError
from megatron_ft.planning.recovery.layout import JobLayouts
from megatron_ft.testing import scheduled_ranks
from megatron_ft.testing.scheduled_ranks import scheduled_memberships


def test_memberships_follow_from_the_schedule_alone() -> None:
    texts = (
        "lose(nodes=[0],before_iteration=1)",
        "change(lose=[2],join=[0],before_iteration=4)",
        "join(nodes=[2],before_iteration=4)",
    )
    first, second, third = scheduled_memberships(
        [MembershipChange.parse(text) for text in texts], JobLayouts(num_nodes=3, ranks_per_node=2)
    )
    assert [m.generation for m in (first, second, third)] == [1, 2, 3]
    assert [m.target.iteration for m in (first, second, third)] == [0, 3, 3]
    assert (first.nodes, first.previous_ranks) == ((1, 1, 2, 2), (2, 3, 4, 5))
    assert (second.nodes, second.previous_ranks) == ((0, 0, 1, 1), (None, None, 0, 1))
    assert (third.nodes, third.previous_ranks) == ((0, 0, 1, 1, 2, 2), (0, 1, 2, 3, None, None))
    assert second.reason == "scheduled: nodes [2] leave and nodes [0] join before iteration 4"


def test_a_node_that_leaves_and_joins_at_once_has_nothing() -> None:
    texts = ("change(lose=[1],join=[1],before_iteration=3)", "change(lose=[],join=[],before_iteration=3)")
    again, anew = scheduled_memberships(
        [MembershipChange.parse(text) for text in texts], JobLayouts(num_nodes=3, ranks_per_node=1)
    )
    assert (again.nodes, again.previous_ranks) == ((0, 1, 2), (0, None, 2))
    assert (anew.nodes, anew.previous_ranks) == ((0, 1, 2), (0, 1, 2))


@pytest.mark.parametrize(
    ("device", "iteration", "constraint"),
    [
        ("cuda", 0, "must be empty with training.device=cuda"),
        ("cpu", 5, "all changes must be after iteration 5, from which the run continues"),
    ],
)
def test_a_schedule_that_cannot_begin_is_refused(device: str, iteration: int, constraint: str) -> None:
    testing = SimpleNamespace(membership_schedule=["lose(nodes=[1],before_iteration=5)"])
    engine: Any = SimpleNamespace(iteration=iteration)
    trainer: Any = SimpleNamespace(
        job=SimpleNamespace(testing=testing), engine=engine, device=SimpleNamespace(type=device)
    )
    schedule: Any = SimpleNamespace(next=SimpleNamespace(target=SimpleNamespace(iteration=4)))
    with pytest.raises(ConfigError, match=rf"^testing\.membership_schedule=.*lose.*: {constraint}"):
        scheduled_ranks._check(trainer, schedule)
    engine.iteration, trainer.device.type = 4, "cpu"
    scheduled_ranks._check(trainer, schedule)

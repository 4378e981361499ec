"""Memberships of a schedule, and the distribution of tensors over senders."""

from megatron_ft.config.membership_schedule import parse_membership_change
from megatron_ft.planning.recovery.replicas import share_out
from megatron_ft.planning.recovery.scripted import scripted_memberships


def test_a_history_needs_nothing_but_its_script() -> None:
    texts = (
        "lose(nodes=[0],before_iteration=1)",
        "change(lose=[2],join=[0],before_iteration=4)",
        "join(nodes=[2],before_iteration=4)",
    )
    first, second, third = scripted_memberships([parse_membership_change(text) for text in texts], 3, 2)
    assert [m.generation for m in (first, second, third)] == [1, 2, 3]
    assert [m.target.iteration for m in (first, second, third)] == [0, 3, 3]
    assert (first.nodes, first.previous_ranks) == ((1, 1, 2, 2), (2, 3, 4, 5))
    assert (second.nodes, second.previous_ranks) == ((0, 0, 1, 1), (None, None, 0, 1))
    assert (third.nodes, third.previous_ranks) == ((0, 0, 1, 1, 2, 2), (0, 1, 2, 3, None, None))
    assert second.reason == "scheduled: nodes [2] leave and nodes [0] join before iteration 4"


def test_a_node_that_leaves_and_joins_at_once_has_nothing() -> None:
    texts = ("change(lose=[1],join=[1],before_iteration=3)", "change(lose=[],join=[],before_iteration=3)")
    again, anew = scripted_memberships([parse_membership_change(text) for text in texts], 3, 1)
    assert (again.nodes, again.previous_ranks) == ((0, 1, 2), (0, None, 2))
    assert (anew.nodes, anew.previous_ranks) == ((0, 1, 2), (0, 1, 2))


def test_bytes_are_shared_out_evenly_and_each_tensor_once() -> None:
    sizes = {"a": 10, "b": 7, "c": 5, "d": 2}
    assert share_out(sizes, [1, 3]) == {1: ("a", "d"), 3: ("b", "c")}
    assert share_out({}, [0]) == {0: ()}

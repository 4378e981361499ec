"""Tests the scripts that repeat the orders of a controller."""

from typing import Any

from benchmarks.histories import at_first_nodes, changes_of, scripted


def order(iteration: int, nodes: list[int], previous: list[int | None]) -> dict[str, Any]:
    """Return a line of decisions.jsonl."""
    return {"next": {"nodes": nodes, "previous_ranks": previous, "target": {"iteration": iteration}}}


def test_losses_and_joins_follow_each_other() -> None:
    orders = [order(4, [0, 1], [0, 1]), order(9, [0, 1, 2], [0, 1, None])]
    assert scripted([], orders, 3) == [
        "testing.membership_schedule=['lose(nodes=[2],before_iteration=5)','join(nodes=[2],before_iteration=10)']"
    ]


def test_orders_at_one_boundary_are_one_change() -> None:
    (change,) = changes_of([order(4, [0, 1, 3], [0, 1, 3]), order(4, [0, 3], [0, 2])], 4)
    assert (change.lose, change.join, change.nodes, change.num_orders) == ((1, 2), (), (0, 3), 2)


def test_a_node_that_comes_back_at_the_boundary_at_which_it_was_lost_does_both() -> None:
    # Node 3 is lost; while the others form, node 1 is lost, too, and node 3 is back.
    (change,) = changes_of([order(4, [0, 1, 2], [0, 1, 2]), order(4, [0, 2, 3], [0, 2, None])], 4)
    assert (change.lose, change.join) == ((1, 3), (3,))
    assert "change(lose=[2],join=[2],before_iteration=5)" in scripted([], [order(4, [0, 1, 2], [0, 1, None])], 3)[0]


def test_a_joining_node_of_a_membership_that_was_broken_is_one_in_the_next() -> None:
    # Node 3 joins after iteration 8; before an iteration is committed node 0 is lost.
    orders = [order(2, [0, 1, 2], [0, 1, 2]), order(8, [0, 1, 2, 3], [0, 1, 2, None]), order(8, [1, 2, 3], [1, 2, 3])]
    first, second = changes_of(orders, 4)
    assert (first.lose, first.join) == ((3,), ())
    assert (second.lose, second.join, second.nodes) == ((0,), (3,), (1, 2, 3))


def test_nothing_is_scripted_where_nothing_was_ordered_or_all_was_declined() -> None:
    assert scripted([], [], 4) == []
    assert scripted([], [{"declined": "too few nodes"}, {"next": None}], 4) == []


def test_entries_that_a_run_names_itself_count_the_newest_of_each_boundary() -> None:
    changes = [
        {"iteration": 9, "schedule": ["lose(nodes=[2],before_iteration=10)"]},
        {"iteration": 4, "schedule": ["lose(nodes=[1],before_iteration=5)"]},
        {"iteration": 4, "schedule": ["lose(nodes=[1],before_iteration=5)", "lose(nodes=[3],before_iteration=5)"]},
    ]
    (override,) = scripted([changes[1], changes[2], changes[0]], [], 4)
    assert override == (
        "testing.membership_schedule=['lose(nodes=[1],before_iteration=5)','lose(nodes=[3],before_iteration=5)',"
        "'lose(nodes=[2],before_iteration=10)']"
    )


def test_spares_get_the_numbers_of_the_nodes_whose_places_they_take() -> None:
    entries = [
        "change(lose=[1],join=[4],before_iteration=3)",
        "change(lose=[4],join=[5],before_iteration=5)",
        "change(lose=[0],join=[6],before_iteration=8)",
    ]
    assert at_first_nodes(entries) == [
        "change(lose=[1],join=[1],before_iteration=3)",
        "change(lose=[1],join=[1],before_iteration=5)",
        "change(lose=[0],join=[0],before_iteration=8)",
    ]

"""Tests the next membership in the form in which ranks receive it."""

from dataclasses import replace

import pytest

from megatron_ft.planning.recovery.membership import NextMembership, Target

JOINED = NextMembership(
    generation=3,
    previous_ranks=(0, 1, None, None, 2, 3),
    nodes=(0, 0, 1, 1, 2, 2),
    target=Target(iteration=0, vote=None),
    master_addr="127.0.0.1",
    master_port=1234,
    reason="node 1 joins",
)


PLACED = replace(
    JOINED,
    previous_ranks=(0, 1, None, None, 4, 5),
    nodes=(2, 2, 3, 3, 1, 1),
    members=(),
    reason="node 0 was lost",
)
"""Membership of a job that keeps its layout: node 3 has taken a place in the middle."""


def test_ranks_keep_their_numbers_where_others_take_places() -> None:
    assert NextMembership.from_json(PLACED.to_json()) == PLACED
    assert [PLACED.rank_on(node, local) for node in (2, 3, 1) for local in (0, 1)] == [0, 1, 2, 3, 4, 5]
    assert PLACED.newcomers == (2, 3)
    assert "on nodes [2, 3, 1]" in PLACED.summary()


def test_joining_ranks_have_no_previous_number() -> None:
    assert NextMembership.from_json(JOINED.to_json()) == JOINED
    assert (JOINED.world_size, JOINED.newcomers) == (6, (2, 3))
    assert "6 ranks, 2 of them new on nodes [0, 1, 2]" in JOINED.summary()
    assert "of them new" not in replace(JOINED, previous_ranks=(0, 1, 2, 3, 4, 5)).summary()


def test_a_process_finds_its_number_by_its_node() -> None:
    assert [JOINED.rank_on(node, local) for node in (0, 1, 2) for local in (0, 1)] == [0, 1, 2, 3, 4, 5]
    assert [JOINED.rank_on(0, 2), JOINED.rank_on(2, 2), JOINED.rank_on(3, 0)] == [None, None, None]


def test_hot_spares_are_on_members_without_a_rank() -> None:
    """Ranks are in Megatron's order: nodes 0 and 1 have stage 0; process 1 of node 1 and node 2 wait."""
    spared = replace(
        JOINED, previous_ranks=(0, 1, 4, 5), nodes=(0, 1, 3, 3), local_ranks=(1, 0, 1, 0), members=(0, 1, 2, 3)
    )
    spared.validate()
    assert NextMembership.from_json(spared.to_json()) == spared
    assert [spared.rank_on(node, local) for node in range(4) for local in (0, 1)] == [
        None,
        0,
        1,
        None,
        None,
        None,
        3,
        2,
    ]
    assert "4 ranks on nodes [0, 1, 2, 3]" in spared.summary()


def test_a_decision_of_an_older_version_can_be_read() -> None:
    content = JOINED.to_json()
    del content["local_ranks"], content["members"]
    assert NextMembership.from_json(content) == JOINED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"previous_ranks": [None] * 6}, "no rank has state"),
        ({"previous_ranks": [1, 1, None, None, 2, 3]}, "two ranks had the same number"),
        ({"local_ranks": [0, 0, 0, 1, 0, 1]}, "ranks share a process"),
        ({"members": [0, 1]}, "a rank is on a node that is not a member"),
        ({"members": [0, 1, 2, 2]}, "a node is listed twice"),
    ],
)
def test_a_membership_that_contradicts_itself_is_refused(changes: dict[str, list[int]], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        NextMembership.from_json({**JOINED.to_json(), **changes})

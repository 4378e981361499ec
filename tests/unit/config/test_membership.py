"""Tests membership changes that are parsed from text."""

import pytest

from megatron_ft.config.membership import MembershipChange, nodes_over_time
from megatron_ft.errors import ConfigError


@pytest.mark.parametrize("text", ["lose(nodes=[1,2],before_iteration=5)", " lose( before_iteration=5, nodes=[1, 2] ) "])
def test_an_entry_says_who_leaves_before_which_iteration(text: str) -> None:
    assert MembershipChange.parse(text) == MembershipChange(lose=(1, 2), before_iteration=5)


def test_nodes_join_and_change_places() -> None:
    joining = MembershipChange.parse("join(nodes=[2],before_iteration=9)")
    both = MembershipChange.parse("change(lose=[0],join=[3],before_iteration=12)")
    assert joining == MembershipChange(join=(2,), before_iteration=9)
    assert both == MembershipChange(lose=(0,), join=(3,), before_iteration=12)
    lost = MembershipChange.parse("lose(nodes=[2,3],before_iteration=1)")
    assert list(nodes_over_time(4, [lost, joining, both])) == [(0, 1, 2, 3), (0, 1), (0, 1, 2), (1, 2, 3)]
    assert both.summary() == "nodes [0] leave and nodes [3] join before iteration 12"


def test_a_node_can_come_back_in_the_change_that_loses_it() -> None:
    again = MembershipChange.parse("change(lose=[0,2],join=[2],before_iteration=4)")
    nothing = MembershipChange.parse("change(lose=[],join=[],before_iteration=4)")
    assert list(nodes_over_time(3, [again, nothing])) == [(0, 1, 2), (1, 2), (1, 2)]
    assert again.summary() == "nodes [0, 2] leave and nodes [2] join before iteration 4"
    assert nothing.summary() == "the placement is planned again before iteration 4"


@pytest.mark.parametrize(
    ("before", "after", "joining", "text"),
    [
        ((0, 1, 2), (0, 1), (), "lose(nodes=[2],before_iteration=7)"),
        ((0, 1), (0, 1, 2), (2,), "join(nodes=[2],before_iteration=7)"),
        ((0, 1, 2), (0, 1, 2), (2,), "change(lose=[2],join=[2],before_iteration=7)"),
        ((0, 1), (0, 1), (), "change(lose=[],join=[],before_iteration=7)"),
        ((0, 0, 1, 1, 2, 2), (0, 0, 3, 3), (3, 3), "change(lose=[1,2],join=[3],before_iteration=7)"),
    ],
)
def test_what_has_happened_is_written_as_a_script(
    before: tuple[int, ...], after: tuple[int, ...], joining: tuple[int, ...], text: str
) -> None:
    change = MembershipChange.between(before, after, joining, before_iteration=7)
    assert change.to_text() == text
    assert MembershipChange.parse(text) == change
    assert change.after(before) == tuple(sorted(set(after)))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "a call of one of lose, join, change"),
        ("lose", "a call of one of"),
        ("gain(nodes=[1],before_iteration=5)", "a call of one of"),
        ("lose([1],before_iteration=5)", "one call with keyword arguments only"),
        ("lose(nodes=[1],before_iteration=5).x()", "one call with keyword arguments only"),
        ("lose(nodes=[1])", "each once"),
        ("lose(nodes=[1],before_iteration=5,rank=1)", "each once"),
        ("lose(**{})", "each once"),
        ("lose(nodes=[1],nodes=[2],before_iteration=5)", "one call|nodes only once"),
        ("lose(nodes=list(),before_iteration=5)", "nodes as a literal"),
        ("lose(nodes=[],before_iteration=5)", "list of their numbers"),
        ("lose(nodes=(1,),before_iteration=5)", "list of their numbers"),
        ("lose(nodes=[True],before_iteration=5)", "list of their numbers"),
        ("lose(nodes=[-1],before_iteration=5)", "list of their numbers"),
        ("lose(nodes=[2,1],before_iteration=5)", "ascending order"),
        ("lose(nodes=[1,1],before_iteration=5)", "ascending order"),
        ("lose(nodes=[1],before_iteration=0)", "at least 1"),
        ("lose(nodes=[1],before_iteration=5.0)", "at least 1"),
        ("lose(nodes=[1],before_iteration=True)", "at least 1"),
        ("join(lose=[1],before_iteration=5)", "each once"),
        ("change(nodes=[1],before_iteration=5)", "each once"),
        ("join(nodes=[],before_iteration=5)", "list of their numbers"),
        ("change(lose=[1,1],join=[],before_iteration=5)", "ascending order"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"testing\.membership_schedule(?s:.*)({word})"):
        MembershipChange.parse(text)

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.model_state import _assign_owners


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_owners_lie_on_distinct_domains_and_share_the_keeping(sizes: list[int], data: st.DataObject) -> None:
    domain_of = {rank: f"node{node}" for node, size in enumerate(sizes) for rank in range(10 * node, 10 * node + size)}
    ranks = data.draw(st.permutations(sorted(domain_of)))
    num_others = data.draw(st.integers(0, len(ranks) - 1))
    members, others = ranks[num_others:], ranks[:num_others]
    copies = data.draw(st.integers(1, len(sizes)))
    owners = _assign_owners(members, domain_of, copies, others)
    assert owners.shape == (len(members), copies)
    assert owners[:, 0].tolist() == members
    for of_shard in owners.tolist():
        assert len({domain_of[rank] for rank in of_shard}) == copies
    kept = Counter(owners[:, 1:].ravel().tolist())
    if max(sizes) * copies <= len(ranks):
        assert max(kept.values(), default=0) <= copies - 1
        if not others:
            assert set(kept.values()) <= {copies - 1}


def test_uneven_domains_give_copies_to_those_that_keep_least() -> None:
    domain_of = {0: "a", 1: "a", 2: "a", 3: "a", 4: "b", 5: "c"}
    owners = _assign_owners(list(range(6)), domain_of, 2)
    assert Counter(owners[:4, 1].tolist()) == {4: 2, 5: 2}


def test_more_copies_than_domains_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_state_copies=3: must be from 1 to 2, the number of failure domains"):
        _assign_owners([0, 1], {0: "a", 1: "b"}, 3)

"""Tests that copies are in other failure domains, distributed as evenly as the domains allow."""

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.snapshot.memory import PeerAssignment


def kept(assignment: PeerAssignment) -> list[int]:
    counts = Counter(peer for peers in assignment.peers for peer in peers)
    return [counts[node] for node in range(len(assignment.peers))]


@settings(max_examples=150, deadline=None)
@given(
    domains=st.lists(st.sampled_from("abcde"), min_size=2, max_size=14),
    num_copies=st.integers(0, 4),
    pairs=st.sets(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=6),
)
def test_every_node_has_its_copies_in_distinct_other_domains(
    domains: list[str], num_copies: int, pairs: set[tuple[int, int]]
) -> None:
    assume(num_copies < len(set(domains)))
    held = {
        node: frozenset(other for first, other in pairs if first == node and other < len(domains)) for node, _ in pairs
    }
    assignment = PeerAssignment.of(domains, num_copies, held)
    assignment.validate()
    assert assignment == PeerAssignment.of(domains, num_copies, held)

    for node, peers in enumerate(assignment.peers):
        copies = {domains[other] for other in (*peers, *held.get(node, ()))} - {domains[node]}
        assert len(copies) >= num_copies
    for node in range(len(domains)):
        assert assignment.sources_of(node) == tuple(n for n, peers in enumerate(assignment.peers) if node in peers)


@pytest.mark.parametrize("num_copies", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("is_striped", [True, False])
def test_domains_of_one_size_keep_equally_much(num_copies: int, size: int, is_striped: bool) -> None:
    names = ["a", "b", "c", "d"]
    domains = names * size if is_striped else [name for name in names for _ in range(size)]
    assert set(kept(PeerAssignment.of(domains, num_copies))) == {num_copies}


def test_nodes_without_named_domains_form_a_ring() -> None:
    assignment = PeerAssignment.of([f"node{node}" for node in range(5)], 2)
    assert assignment.peers == ((1, 2), (2, 3), (3, 4), (4, 0), (0, 1))


def every_assignment(domains: str, num_copies: int) -> list[list[int]]:
    """Yield the number of copies on each node, for every possible assignment."""
    choices = [
        [
            chosen
            for chosen in combinations(range(len(domains)), num_copies)
            if len({domains[node], *(domains[peer] for peer in chosen)}) == num_copies + 1
        ]
        for node in range(len(domains))
    ]
    return [[sum(node in chosen for chosen in peers) for node in range(len(domains))] for peers in product(*choices)]


@pytest.mark.parametrize(
    ("domains", "num_copies"), [("aaabc", 1), ("aaabc", 2), ("aabbc", 2), ("aabcd", 2), ("aaab", 1), ("aaabb", 1)]
)
def test_uneven_domains_are_as_even_as_any_assignment(domains: str, num_copies: int) -> None:
    found = kept(PeerAssignment.of(domains, num_copies))
    best = min(sum(count**2 for count in counts) for counts in every_assignment(domains, num_copies))
    assert sum(count**2 for count in found) == best


def test_single_nodes_beside_a_large_domain_keep_more() -> None:
    assert sorted(kept(PeerAssignment.of("aaabc", 2))) == [0, 1, 1, 4, 4]


def test_domains_that_hold_the_bytes_are_copies_already() -> None:
    held = {0: frozenset({1}), 1: frozenset({0})}
    assignment = PeerAssignment.of("abcd", 2, held)
    assert [len(peers) for peers in assignment.peers] == [1, 1, 2, 2]
    assert 1 not in assignment.peers[0]
    assert 0 not in assignment.peers[1]
    assert max(kept(assignment)) - min(kept(assignment)) <= 1
    assert PeerAssignment.of("abcd", 1, {node: frozenset(range(4)) for node in range(4)}).peers == ((), (), (), ())


def test_what_the_own_domain_holds_is_no_copy() -> None:
    assignment = PeerAssignment.of("aabb", 1, {0: frozenset({1})})
    assert [len(peers) for peers in assignment.peers] == [1, 1, 1, 1]


@pytest.mark.parametrize(("domains", "num_copies"), [("ab", 2), ("aaaa", 1), ("abc", -1)])
def test_too_few_domains_are_refused(domains: str, num_copies: int) -> None:
    with pytest.raises(ConfigError, match=rf"snapshot\.num_peer_copies={num_copies}: must be"):
        PeerAssignment.of(domains, num_copies)


def test_a_thousand_uneven_nodes_are_assigned_quickly() -> None:
    domains = [f"rack{node * node % 37}" for node in range(1000)]
    assignment = PeerAssignment.of(domains, 2)
    assignment.validate()
    assert "copies of each node in other failure domains: 2; 1000 nodes" in assignment.summary()


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (((1,), (0,), (1,), (2,)), "own domain"),
        (((2, 3), (2,), (0,), (0,)), "two copies"),
        (((), (2,), (0,), (0,)), "0 copies"),
    ],
)
def test_wrong_assignments_do_not_validate(peers: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        PeerAssignment(peers=peers, failure_domains=("a", "a", "b", "b"), num_copies=1).validate()

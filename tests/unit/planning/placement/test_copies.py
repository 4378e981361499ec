"""Tests copies of optimizer state: they are on distinct failure domains for any number of ranks, and their bytes are
counted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.algorithms import ALGORITHMS
from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.copies import NON_EXPERT, StateCopyPlan
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.survival import survival
from megatron_ft.topology import Cluster


def place(num_nodes: int, ranks_per_node: int, num_slots: int, loads: list[int]) -> PlacementPlan:
    counts = allocate(loads, num_nodes * ranks_per_node * num_slots, 1).replica_counts
    cluster = Cluster.of(num_nodes, ranks_per_node)
    return ALGORITHMS["overlap_search"]().place([counts], cluster, num_slots_per_rank=num_slots)


def owner_domains(plan: StateCopyPlan) -> set[frozenset[str]]:
    """Return the failure domains of the owners of each shard."""
    domain_of = dict(zip(plan.ranks, plan.domains, strict=True))
    return {frozenset(domain_of[rank] for rank in owners) for each in plan.operators for owners in each.owners}


@settings(max_examples=40, deadline=None)
@given(
    num_nodes=st.integers(1, 6),
    ranks_per_node=st.integers(1, 3),
    loads=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    copies=st.integers(1, 3),
)
def test_losses_below_the_copies_lose_nothing(
    num_nodes: int, ranks_per_node: int, loads: list[int], copies: int
) -> None:
    plan = place(num_nodes, ranks_per_node, 6, loads)
    copies = min(copies, num_nodes)
    owned = StateCopyPlan.of(plan, copies, expert_bytes=1000, non_expert_bytes=[(0, 999), (1, 50)])
    domains = tuple(dict.fromkeys(plan.domains))
    assert survival(owner_domains(owned), domains, [copies - 1])[0].probability == 1.0
    assert owned.num_bytes == copies * (1000 * len(loads) + 999 + 50)
    assert all(len(set(owners)) == copies for o in owned.operators for owners in o.owners)


def test_first_owners_compute_and_the_rest_need_not() -> None:
    plan = place(4, 1, 2, [1, 1, 1, 100])
    owned = StateCopyPlan.of(plan, 3, expert_bytes=12)
    for operator in owned.operators:
        holders = [rank for rank, experts in zip(plan.ranks, plan.slots[0], strict=True) if operator.expert in experts]
        assert [owners[0] for owners in operator.owners] == holders
        assert all(len(set(owners)) == 3 for owners in operator.owners)


def test_a_digest_names_the_owners_but_not_the_bytes() -> None:
    plan = place(4, 1, 2, [1, 1, 1, 5])
    digest = StateCopyPlan.of(plan, 2, expert_bytes=10).digest
    assert digest == StateCopyPlan.of(plan, 2, expert_bytes=20).digest
    assert digest != StateCopyPlan.of(plan, 3, expert_bytes=10).digest


def test_copies_with_every_holder() -> None:
    plan = place(4, 1, 2, [1, 1, 1, 5])
    owned = StateCopyPlan.of(plan, None, expert_bytes=10, non_expert_bytes=[(0, 7)])
    assert owned.num_bytes == 10 * sum(len(set(experts)) for experts in plan.slots[0]) + 4 * 7
    assert owner_domains(owned) == {*plan.all_expert_domains(), frozenset(plan.domains)}
    assert "every rank that computes with the expert" in owned.summary()


def test_non_expert_state_is_shared_evenly() -> None:
    plan = place(3, 1, 4, [1] * 8)
    owned = StateCopyPlan.of(plan, 2, expert_bytes=0, non_expert_bytes=[(0, 3001)])
    per_rank = owned.bytes_per_rank()
    assert sum(per_rank.values()) == 6002
    assert max(per_rank.values()) - min(per_rank.values()) <= 2
    (operator,) = (o for o in owned.operators if o.expert == NON_EXPERT)
    assert [operator.shard_range(shard, 3001) for shard in range(3)] == [(0, 1000), (1000, 2000), (2000, 3001)]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_shards_without_replicas_are_copied_to_other_domains(copies: int) -> None:
    """The ranks 4 to 9 of a stage are in three domains of two ranks."""
    ranks, domains = range(4, 10), ["a", "a", "b", "b", "c", "c"]
    owned = StateCopyPlan.of_shards(ranks, domains, copies, num_bytes=6000)
    (shards,) = owned.operators
    assert (owned.ranks, shards.expert, owned.num_bytes) == (tuple(ranks), NON_EXPERT, copies * 6000)
    assert set(owned.bytes_per_rank().values()) == {copies * 1000}
    for rank, owners in zip(ranks, shards.owners, strict=True):
        assert owners[0] == rank and len({domains[owner - 4] for owner in owners}) == copies


@pytest.mark.parametrize("copies", [0, 4])
def test_more_copies_than_domains_are_refused(copies: int) -> None:
    with pytest.raises(ConfigError, match=f"num_state_copies={copies}"):
        StateCopyPlan.of(place(3, 1, 2, [1, 1]), copies, expert_bytes=1)
    with pytest.raises(ConfigError, match=f"num_state_copies={copies}"):
        StateCopyPlan.of_shards(range(3), ["a", "b", "c"], copies, num_bytes=1)

"""Tests the placement of copies that uses what peers hold anyway (MoEtion, algorithm 2)."""

import itertools
import random

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.planning.snapshot.held_copies import KINDS, CopyPlan, Kind, Sharding, is_divided
from megatron_ft.planning.snapshot.memory import PeerAssignment
from megatron_ft.topology import Topology

SHARDINGS: tuple[Sharding, ...] = ("none", "zero1", "zero2", "zero3")
LAYOUTS = {
    "DP8 EP4": Topology(world_size=8, expert_model_parallel_size=4),
    "DP8 EP8": Topology(world_size=8, expert_model_parallel_size=8),
    "PP2 DP4 EP2": Topology(world_size=8, pipeline_model_parallel_size=2, expert_model_parallel_size=2),
    "TP2 DP4 EP2": Topology(world_size=8, tensor_model_parallel_size=2, expert_model_parallel_size=2),
}


def plan(
    topology: Topology, sharding: Sharding, *, num_copies: int = 2, ranks_per_node: int = 1, domains: int | None = None
) -> CopyPlan:
    num_nodes = topology.world_size // ranks_per_node
    names = [f"rack{node % (domains or num_nodes)}" for node in range(num_nodes)]
    return CopyPlan.of(
        topology,
        [rank // ranks_per_node for rank in range(topology.world_size)],
        domains=names,
        num_copies=num_copies,
        sharding=sharding,
        node_bytes={kind: [10**place] * num_nodes for place, kind in enumerate(KINDS)},
    )


def sent(found: CopyPlan) -> dict[Kind, set[int]]:
    """Return the numbers of copies that nodes send of each kind."""
    return {kind: {len(peers) for peers in found.by_kind[kind].peers} for kind in KINDS}


@pytest.mark.parametrize(
    ("layout", "sharding", "wanted"),
    [
        # Seven other nodes have everything outside experts, and one other node has the same experts.
        ("DP8 EP4", "none", (0, 0, 1, 1)),
        ("DP8 EP4", "zero1", (0, 2, 1, 2)),
        ("DP8 EP4", "zero2", (0, 2, 1, 2)),
        ("DP8 EP4", "zero3", (2, 2, 2, 2)),
        ("DP8 EP8", "none", (0, 0, 2, 2)),
        ("PP2 DP4 EP2", "none", (0, 0, 1, 1)),
        ("TP2 DP4 EP2", "zero1", (0, 2, 0, 2)),
    ],
)
def test_only_copies_that_peers_lack_are_sent(layout: str, sharding: Sharding, wanted: tuple[int, ...]) -> None:
    found = plan(LAYOUTS[layout], sharding)
    assert sent(found) == {kind: {number} for kind, number in zip(KINDS, wanted, strict=True)}
    total = sum(number * 10**place for place, number in enumerate(wanted))
    assert found.sent_bytes == (total,) * 8


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("num_copies", [1, 2])
def test_every_kind_survives_the_loss_of_as_many_domains_as_it_has_copies(
    layout: str, sharding: Sharding, ranks_per_node: int, num_copies: int
) -> None:
    topology = LAYOUTS[layout]
    found = plan(topology, sharding, num_copies=num_copies, ranks_per_node=ranks_per_node, domains=4)
    num_nodes = topology.world_size // ranks_per_node
    for kind, node in itertools.product(KINDS, range(num_nodes)):
        assignment = found.by_kind[kind]
        assert not is_divided(kind, sharding) or not assignment.held_by(node)
        holders = {node, *assignment.peers[node], *assignment.held_by(node)}
        for lost in itertools.combinations(set(assignment.failure_domains), num_copies):
            assert any(assignment.failure_domains[holder] not in lost for holder in holders)


def test_data_parallel_peers_come_first() -> None:
    topology = LAYOUTS["PP2 DP4 EP2"]
    found = plan(topology, "zero1")
    for node, peers in enumerate(found.by_kind["optimizer"].peers):
        assert {peer // 4 for peer in peers} == {node // 4}, "the stages are nodes 0 to 3 and 4 to 7"
    one = plan(topology, "zero1", num_copies=3).by_kind["expert_optimizer"]
    for node, peers in enumerate(one.peers):
        same = {other for other in range(8) if other // 4 == node // 4 and other % 2 == node % 2} - {node}
        assert same <= set(peers) and len(peers) == 3, "one peer has the same experts, two others are further away"


@pytest.mark.parametrize("seed", range(60))
def test_copies_move_to_distant_nodes_only_if_near_ones_are_too_few(seed: int) -> None:
    generator = random.Random(seed)
    num_nodes = generator.randint(3, 9)
    domains = [f"rack{generator.randrange(num_nodes)}" for _ in range(num_nodes)]
    num_domains = len(set(domains))
    if num_domains < 2:
        pytest.skip("one domain holds no copies")
    num_copies = generator.randint(1, min(3, num_domains - 1))
    near = {
        node: frozenset(
            generator.sample([o for o in range(num_nodes) if o != node], generator.randint(0, num_nodes - 1))
        )
        for node in range(num_nodes)
    }
    found = PeerAssignment.of(domains, num_copies, near=near)
    found.validate()
    for node, peers in enumerate(found.peers):
        usable = {domains[other] for other in near[node]} - {domains[node]}
        assert sum(peer in near[node] for peer in peers) >= min(num_copies, len(usable))


def test_more_copies_than_other_domains_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_peer_copies"):
        plan(LAYOUTS["DP8 EP4"], "none", num_copies=3, domains=3)

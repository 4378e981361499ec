"""Peer assignment: nodes in other failure domains that keep copies of each node's windows, evenly distributed."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_ft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAssignment:
    """Nodes that keep copies of every node's windows."""

    peers: tuple[tuple[int, ...], ...]
    """Nodes that keep a copy of each node, nearest on the ring first."""
    failure_domains: tuple[str, ...]
    """Failure domain of each node."""
    num_copies: int
    """Number of other failure domains that must hold the windows of a node."""
    already_held: tuple[tuple[int, ...], ...] = ()
    """Nodes that capture the same bytes as each node; empty if no node does."""

    def sources_of(self, node: int) -> tuple[int, ...]:
        """Nodes whose copies ``node`` keeps."""
        return tuple(source for source, peers in enumerate(self.peers) if node in peers)

    def held_by(self, node: int) -> tuple[int, ...]:
        """Nodes that capture the same bytes as ``node``."""
        return self.already_held[node] if self.already_held else ()

    def validate(self) -> None:
        """Assert that ``num_copies`` other domains hold the windows of every node, with one copy in each."""
        assert len(self.peers) == len(self.failure_domains), "a node has no peers or no failure domain"
        domains = self.failure_domains
        for node, peers in enumerate(self.peers):
            chosen = [domains[peer] for peer in peers]
            held = {domains[other] for other in self.held_by(node)} - {domains[node]}
            assert len(set(chosen)) == len(chosen), f"node {node} has two copies in one domain: {chosen}"
            assert domains[node] not in chosen, f"node {node} has a copy in its own domain"
            assert not held & set(chosen), f"node {node} has a copy in a domain that already holds its bytes"
            assert len(chosen) == max(0, self.num_copies - len(held)), f"node {node} has {len(chosen)} copies"

    def summary(self) -> str:
        kept = Counter(chain.from_iterable(self.peers))
        counts = [kept[node] for node in range(len(self.peers))]
        return (
            f"{self.num_copies} copies in other failure domains: {len(self.peers)} nodes in "
            f"{len(set(self.failure_domains))} domains keep {min(counts)} to {max(counts)} copies each"
        )


def assign_peers(
    failure_domains: Sequence[str], num_copies: int, already_held: Mapping[int, frozenset[int]] | None = None
) -> PeerAssignment:
    """Assign peers to every node.

    Nodes form a ring on which domains alternate, and a node's copies go to the next nodes of other domains. With
    domains of equal size every node then keeps ``num_copies`` copies. Otherwise copies are moved from nodes with many
    copies to nodes with fewer, along chains of moves, until the sum of squares of copies per node is minimal. Uneven
    domains can leave uneven counts: with domains of 3, 1 and 1 nodes and two copies, the two single nodes keep four
    copies each.

    Args:
        failure_domains: failure domain of each node of the job.
        num_copies: r, other domains that must hold every node's windows.
        already_held: nodes that capture the same bytes as a node; their domains count as copies.

    Raises:
        ConfigError: fewer other domains than copies.
    """
    num_domains = len(set(failure_domains))
    if not 0 <= num_copies < num_domains:
        raise ConfigError.of(
            "snapshot.num_peer_copies",
            num_copies,
            f"must be at least 0 and below the number of failure domains, {num_domains}",
        )
    # Every rank computes the assignment itself: it depends on nothing but its arguments, and ties go by node number.
    nodes = range(len(failure_domains))
    held = [frozenset((already_held or {}).get(node, ())) for node in nodes]
    ring = _Ring(failure_domains, num_copies, held)
    ring.even_out()
    return PeerAssignment(
        peers=tuple(tuple(ring.sorted_peers(node)) for node in nodes),
        failure_domains=tuple(failure_domains),
        num_copies=num_copies,
        already_held=tuple(tuple(sorted(others)) for others in held) if any(held) else (),
    )


class _Ring:
    """Peers of all nodes while copies are assigned."""

    def __init__(self, domains: Sequence[str], num_copies: int, held: Sequence[frozenset[int]]) -> None:
        self._domains = domains
        self._order = _alternating(domains)
        self._place = {node: place for place, node in enumerate(self._order)}
        self._taken = [{domains[other] for other in (node, *held[node])} for node in range(len(domains))]
        self.peers = [self._next_peers(node, num_copies - len(self._taken[node]) + 1) for node in self._nodes]
        self._kept = Counter(chain.from_iterable(self.peers))

    @property
    def _nodes(self) -> range:
        return range(len(self._domains))

    def sorted_peers(self, node: int) -> list[int]:
        """Peers of a node, nearest on the ring first."""
        return sorted(self.peers[node], key=lambda peer: self._distance(node, peer))

    def even_out(self) -> None:
        """Move copies until the sum of squares of copies per node is minimal."""
        while any(self._shift_one(node) for node in sorted(self._nodes, key=lambda node: -self._kept[node])):
            pass

    def _distance(self, node: int, other: int) -> int:
        return (self._place[other] - self._place[node]) % len(self._order)

    def _next_peers(self, node: int, num_peers: int) -> list[int]:
        peers: list[int] = []
        used = set(self._taken[node])
        for offset in range(1, len(self._order)):
            other = self._order[(self._place[node] + offset) % len(self._order)]
            if len(peers) < num_peers and self._domains[other] not in used:
                peers.append(other)
                used.add(self._domains[other])
        return peers

    def _shift_one(self, start: int) -> bool:
        # A move lowers the sum of squares only if the last node of the chain has at least two copies fewer; those
        # between keep their number.
        limit = self._kept[start] - 2
        if limit < min(self._kept[node] for node in self._nodes):
            return False
        sources: dict[int, list[int]] = {node: [] for node in self._nodes}
        for source, peers in enumerate(self.peers):
            for peer in peers:
                sources[peer].append(source)
        came: dict[int, tuple[int, int] | None] = {start: None}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            if self._kept[node] <= limit:
                self._move(node, came)
                return True
            for source in sources[node]:
                for other in self._alternatives(source, node):
                    if other not in came:
                        came[other] = (node, source)
                        queue.append(other)
        return False

    def _alternatives(self, source: int, peer: int) -> list[int]:
        """Nodes that could keep the copy of ``source`` instead of ``peer``, in ring order."""
        # A second copy in a domain would be lost together with the first one.
        used = self._taken[source] | {self._domains[other] for other in self.peers[source] if other != peer}
        return [other for other in self._order if other != peer and self._domains[other] not in used]

    def _move(self, end: int, came: Mapping[int, tuple[int, int] | None]) -> None:
        node = end
        while (step := came[node]) is not None:
            previous, source = step
            self.peers[source][self.peers[source].index(previous)] = node
            self._kept[previous] -= 1
            self._kept[node] += 1
            node = previous


def _alternating(domains: Sequence[str]) -> list[int]:
    # Order nodes so that those of every domain are evenly spaced.
    members: dict[str, list[int]] = {}
    for node, domain in enumerate(domains):
        members.setdefault(domain, []).append(node)
    places = [
        ((2 * position + 1) / (2 * len(nodes)), first, node)
        for first, nodes in enumerate(members.values())
        for position, node in enumerate(nodes)
    ]
    return [node for _, _, node in sorted(places)]

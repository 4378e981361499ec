"""Assigns peers: nodes in other failure domains that store copies of each node's windows, evenly distributed."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_ft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAssignment:
    """Peers of every node, which store copies of the node's windows."""

    peers: tuple[tuple[int, ...], ...]
    """Peers of each node, nearest on the ring first."""
    failure_domains: tuple[str, ...]
    """Failure domain of each node."""
    num_copies: int
    """Number of other failure domains that must hold the windows of a node."""
    already_held: tuple[tuple[int, ...], ...] = ()
    """Other nodes that capture the same bytes as each node and thus replace copies; empty without such nodes."""

    def sources_of(self, node: int) -> tuple[int, ...]:
        """Return the nodes of which ``node`` stores copies."""
        return tuple(source for source, peers in enumerate(self.peers) if node in peers)

    def held_by(self, node: int) -> tuple[int, ...]:
        """Return the other nodes that capture the same bytes as ``node``."""
        return self.already_held[node] if self.already_held else ()

    def validate(self) -> None:
        """Assert that the windows of every node are in ``num_copies`` other domains, with at most one copy in each."""
        assert len(self.peers) == len(self.failure_domains), "a node has no peers or no failure domain"
        domains = self.failure_domains
        for node, peers in enumerate(self.peers):
            chosen = [domains[peer] for peer in peers]
            held = {domains[other] for other in self.held_by(node)} - {domains[node]}
            assert len(set(chosen)) == len(chosen), f"node {node} has two copies in one domain: {chosen}"
            assert domains[node] not in chosen, f"node {node} has a copy in its own domain"
            assert not held & set(chosen), f"node {node} has a copy in a domain that already holds its bytes"
            needed = max(0, self.num_copies - len(held))
            assert len(chosen) == needed, f"node {node} has {len(chosen)} copies instead of {needed}"

    def summary(self) -> str:
        kept = Counter(chain.from_iterable(self.peers))
        counts = [kept[node] for node in range(len(self.peers))]
        return (
            f"copies of each node in other failure domains: {self.num_copies}; {len(self.peers)} nodes in "
            f"{len(set(self.failure_domains))} domains store {min(counts)} to {max(counts)} copies each"
        )

    @classmethod
    def of(
        cls, failure_domains: Sequence[str], num_copies: int, already_held: Mapping[int, frozenset[int]] | None = None
    ) -> "PeerAssignment":
        """Assign peers to every node.

        Nodes form a ring on which failure domains alternate, and the copies of a node go to the next nodes in other
        domains. If all domains have the same size, every node stores ``num_copies`` copies. Otherwise chains of moves
        bring copies from nodes with many copies to nodes with fewer, until the sum of the squared numbers of copies is
        minimal. Uneven domains can leave uneven numbers: with domains of 3, 1 and 1 nodes and two copies, the two
        single nodes store four copies each.

        Args:
            failure_domains: failure domain of each node of the job.
            num_copies: number of other failure domains that must contain the windows of each node (r).
            already_held: other nodes that capture the same bytes as a node; their domains count as copies.

        Raises:
            ConfigError: the number of failure domains is not above ``num_copies``.
        """
        num_domains = len(set(failure_domains))
        if not 0 <= num_copies < num_domains:
            raise ConfigError.of(
                "snapshot.num_peer_copies",
                num_copies,
                f"must be at least 0 and below the number of failure domains, {num_domains}",
            )
        # Every rank computes the assignment itself, so the result depends only on the arguments. Ties: smaller node
        # number.
        nodes = range(len(failure_domains))
        held = [frozenset((already_held or {}).get(node, ())) for node in nodes]
        ring = _Ring(failure_domains, num_copies, held)
        ring.even_out()
        return cls(
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
        """Return the peers of ``node``, nearest on the ring first."""
        return sorted(self.peers[node], key=lambda peer: self._distance(node, peer))

    def even_out(self) -> None:
        """Move copies between nodes until the sum of the squared numbers of copies is minimal."""
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
        # A chain of moves lowers the sum of squares only if its last node has at least two copies fewer than its first
        # node. The number of copies on nodes between them does not change.
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
        """Return the nodes that could store the copy of ``source`` instead of ``peer``, in the order of the ring."""
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
    # Orders nodes so that the nodes of each domain are evenly spaced.
    members: dict[str, list[int]] = {}
    for node, domain in enumerate(domains):
        members.setdefault(domain, []).append(node)
    places = [
        ((2 * position + 1) / (2 * len(nodes)), first, node)
        for first, nodes in enumerate(members.values())
        for position, node in enumerate(nodes)
    ]
    return [node for _, _, node in sorted(places)]

"""Decides where windows are stored: peers that store copies, buffers of each rank, and host memory of each node."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

from megatron_ft.errors import ConfigError
from megatron_ft.formatting import memory_size
from megatron_ft.planning.iteration import WindowReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAssignment:
    """Peers of every node, which store copies of the node's windows."""

    peers: tuple[tuple[int, ...], ...]
    """Peers (nodes that store copies) of each node, nearest on the ring of nodes first."""
    failure_domains: tuple[str, ...]
    """Failure domain of each node."""
    num_copies: int
    """Number of other failure domains that must contain the windows of a node."""
    already_held: tuple[tuple[int, ...], ...] = ()
    """Other nodes that capture the same bytes, for each node. Their failure domains need no copy of the node's
    windows. Empty if no two nodes capture the same bytes."""

    def sources_of(self, node: int) -> tuple[int, ...]:
        """Return the nodes for which ``node`` stores copies of windows."""
        return tuple(source for source, peers in enumerate(self.peers) if node in peers)

    def held_by(self, node: int) -> tuple[int, ...]:
        """Return the other nodes that capture the same state as ``node``."""
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
        cls,
        failure_domains: Sequence[str],
        num_copies: int,
        already_held: Mapping[int, frozenset[int]] | None = None,
        *,
        near: Mapping[int, frozenset[int]] | None = None,
    ) -> "PeerAssignment":
        """Assign peers to every node.

        Nodes form a ring on which failure domains alternate, and the copies of a node go to the next nodes in other
        domains. If all domains have the same size, every node stores ``num_copies`` copies. Otherwise copies move from
        nodes with many copies to nodes with fewer, until the sum over nodes of the squared number of copies is minimal.
        The numbers can still be uneven: with domains of 3, 1 and 1 nodes and two copies, the two single nodes store
        four copies each.

        Args:
            failure_domains: failure domain of each node of the job.
            num_copies: number of other failure domains that must contain the windows of each node (r).
            already_held: other nodes that capture the same bytes as a node; their domains count as copies.
            near: for each node, the nodes that get its copies first. Other nodes get copies only if these nodes are too
                few. None to treat all nodes alike.

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
        # Every rank computes the assignment, so it must depend only on the arguments. Smaller node numbers decide ties.
        nodes = range(len(failure_domains))
        held = [frozenset((already_held or {}).get(node, ())) for node in nodes]
        closest = [frozenset((near or {}).get(node, ())) for node in nodes]
        ring = _Ring(failure_domains, num_copies, held, closest)
        ring.even_out()
        return cls(
            peers=tuple(tuple(ring.sorted_peers(node)) for node in nodes),
            failure_domains=tuple(failure_domains),
            num_copies=num_copies,
            already_held=tuple(tuple(sorted(others)) for others in held) if any(held) else (),
        )


class _Ring:
    """Peers (nodes that store copies) of every node, during the assignment of copies."""

    def __init__(
        self,
        domains: Sequence[str],
        num_copies: int,
        held: Sequence[frozenset[int]],
        near: Sequence[frozenset[int]],
    ) -> None:
        self._domains = domains
        self._near = near
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
        others = [self._order[(self._place[node] + offset) % len(self._order)] for offset in range(1, len(self._order))]
        for other in sorted(others, key=lambda other: other not in self._near[node]):
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
        """Return the nodes that could replace ``peer`` as a node that stores copies of the windows of ``source``. They
        are in the order of the ring."""
        # A second copy in a domain would be lost together with the first one.
        used = self._taken[source] | {self._domains[other] for other in self.peers[source] if other != peer}
        near, is_near = self._near[source], peer in self._near[source]
        # Evening out must not move a copy from a near node to a distant one.
        return [
            other
            for other in self._order
            if other != peer and self._domains[other] not in used and (not is_near or other in near)
        ]

    def _move(self, end: int, came: Mapping[int, tuple[int, int] | None]) -> None:
        node = end
        while (step := came[node]) is not None:
            previous, source = step
            self.peers[source][self.peers[source].index(previous)] = node
            self._kept[previous] -= 1
            self._kept[node] += 1
            node = previous


def _alternating(domains: Sequence[str]) -> list[int]:
    # Returns all nodes in an order in which the nodes of each domain are evenly spaced.
    members: dict[str, list[int]] = {}
    for node, domain in enumerate(domains):
        members.setdefault(domain, []).append(node)
    places = [
        ((2 * position + 1) / (2 * len(nodes)), first, node)
        for first, nodes in enumerate(members.values())
        for position, node in enumerate(nodes)
    ]
    return [node for _, _, node in sorted(places)]


NUM_BUFFERS = 3
"""Number of window buffers of each rank, in the memory of its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStates:
    """Snapshot server's report about a rank's buffers. It may not yet include the newest messages of the rank."""

    replicated: Mapping[int, int] = field(default_factory=dict)
    """Start iteration of each replicated window; the key is the index of its buffer."""
    given_up: Mapping[int, int] = field(default_factory=dict)
    """Start iteration of each window that at least one peer will never receive; the key is the buffer index."""
    pinned: frozenset[int] = frozenset()
    """Indices of the buffers that are being written to storage and must not be changed or reused."""
    knows_commits: bool = True
    """Whether the server has processed every commit. If not, ``pinned`` may be incomplete, because a commit can cause a
    buffer to be written to storage."""
    failed_start: int = -1
    """Start iteration of the newest window whose write to storage has failed; -1 if none has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBuffers:
    """Windows in a rank's buffers: at most one committed, one being replicated and one being captured."""

    held: dict[int, int] = field(default_factory=dict)
    """Index of the buffer of each window; the key is the window's start iteration."""
    committed: int = -1
    """Start iteration of the newest committed window; -1 if no window is committed."""

    def report(self, states: BufferStates) -> WindowReport:
        """Return this rank's window states for the vote, which combines the states of all ranks for ``after_vote``."""
        held = sorted(self.held.items())
        # If all buffers are in use, the next commit frees the buffer of the oldest window for the next window.
        spare = self._unheld() or {held[0][1]}
        return WindowReport(
            replicated_windows=_bits(states.replicated.get(buffer) == start for start, buffer in held),
            given_up_windows=_bits(states.given_up.get(buffer) == start for start, buffer in held),
            has_free_buffer=int(states.knows_commits and not spare <= states.pinned),
            unwritten_start=states.failed_start,
        )

    def after_vote(self, vote: WindowReport) -> "WindowBuffers":
        """Return the windows after a vote.

        The newest window that every rank has replicated is committed, and older windows are released. A newer window
        that any rank has given up can never be committed and is released as well.
        """
        # Bit i of the vote stands for the i-th oldest window. Every rank has the same windows, because only votes and
        # iterations change them; the buffer of a window may differ between ranks.
        starts = sorted(self.held)
        replicated = [start for index, start in enumerate(starts) if vote.replicated_windows >> index & 1]
        after = self.after_commit(max(replicated, default=-1))
        for index, start in enumerate(starts):
            # The committed window stays: it is the state that a restart would use.
            if vote.given_up_windows >> index & 1 and start > after.committed:
                after = after.abandon(start)
        return after

    def after_commit(self, committed: int) -> "WindowBuffers":
        """Return the windows after the commit of the window that starts at ``committed``, without older windows."""
        # The committed window stays in its buffer, so later votes report it again. Then nothing changes.
        if committed <= self.committed:
            return self
        held = {start: buffer for start, buffer in self.held.items() if start >= committed}
        return WindowBuffers(held=held, committed=committed)

    def free(self, pinned: Set[int] = frozenset()) -> int | None:
        """Return the index of a buffer that contains no window and is not in ``pinned``; None if no buffer is free."""
        return min(self._unheld() - pinned, default=None)

    def begin(self, start_iteration: int, pinned: Set[int] = frozenset()) -> "WindowBuffers":
        """Return the windows plus a new one that starts at ``start_iteration``, in a free buffer."""
        buffer = self.free(pinned)
        assert buffer is not None, (
            f"no buffer is free for the window of iteration {start_iteration}; buffer of each window: {self.held}"
        )
        return WindowBuffers(held={**self.held, start_iteration: buffer}, committed=self.committed)

    def abandon(self, start_iteration: int) -> "WindowBuffers":
        """Return the windows without the one that starts at ``start_iteration``, which will not be completed."""
        held = {start: buffer for start, buffer in self.held.items() if start != start_iteration}
        return WindowBuffers(held=held, committed=self.committed)

    def _unheld(self) -> frozenset[int]:
        return frozenset(range(NUM_BUFFERS)) - frozenset(self.held.values())


def _bits(flags: Iterable[bool]) -> int:
    return sum(flag << index for index, flag in enumerate(flags))


# These constants must match those of the snapshot server (``snapshot/server``), which planning does not import.
NUM_OWN_BUFFERS = 3
"""Number of buffers for the windows of one rank: one is committed, one is being replicated, one is being captured."""
NUM_COPY_BUFFERS = 2
"""Number of buffers for copies of the windows of one rank on another node: one is committed, one is being received."""
STATUS_BYTES = 4096
"""Bytes of the status page, which is in memory before a rank's buffers and contains their states."""
_PAGE_BYTES = 4096
# A buffer that is too small for the next plan is replaced, and the windows in it are lost.
_MARGIN_FOR_OTHER_PLANS = (5, 4)
"""Size of a buffer divided by the size of a window, as (numerator, denominator), for jobs whose later plans may have
another order of operators, and then larger windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Bytes of host memory for windows on one node."""

    own_bytes: int
    """Bytes of the windows of the node's own ranks."""
    copies_bytes: int
    """Bytes of the copies of other nodes' windows."""
    device_bytes: int = 0
    """Additional memory on devices; always 0, because slices are copied directly from the state."""

    @property
    def total_bytes(self) -> int:
        """Host memory for windows on the node, in bytes."""
        return self.own_bytes + self.copies_bytes


def host_bytes(
    window_bytes: Sequence[int],
    rank_places: Sequence[int],
    assignment: PeerAssignment,
    *,
    plans_again: bool = False,
) -> tuple[NodeMemory, ...]:
    """Compute the memory for windows on every node.

    Args:
        window_bytes: bytes of a window of each rank (``window_bytes_by_rank``).
        rank_places: node of each rank, as an index into the nodes of ``assignment``.
        plans_again: whether later plans can have larger windows.
    """
    num_nodes = len(assignment.peers)
    by_node: list[list[int]] = [[] for _ in range(num_nodes)]
    for place, num_bytes in zip(rank_places, window_bytes, strict=True):
        by_node[place].append(buffer_bytes(num_bytes, plans_again=plans_again))
    return tuple(
        NodeMemory(
            own_bytes=sum(NUM_OWN_BUFFERS * num_bytes + STATUS_BYTES for num_bytes in by_node[node]),
            copies_bytes=sum(NUM_COPY_BUFFERS * sum(by_node[source]) for source in assignment.sources_of(node)),
        )
        for node in range(num_nodes)
    )


def buffer_bytes(window_bytes: int, *, plans_again: bool) -> int:
    """Return the bytes of one buffer of a rank: ``window_bytes``, plus a margin if ``plans_again`` is true."""
    numerator, denominator = _MARGIN_FOR_OTHER_PLANS if plans_again else (1, 1)
    return _whole_pages(max(1, -(-window_bytes * numerator // denominator)))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def check_limit(needed_bytes: int, limit_bytes: int | None) -> None:
    """Check that windows and copies need at most ``snapshot.host_memory_limit_bytes``. Raises ConfigError otherwise."""
    within_limit(
        limit_bytes,
        "snapshot.host_memory_limit_bytes",
        needed_bytes,
        "the memory of windows and peer copies on the node that needs most memory for them; lower "
        "snapshot.num_peer_copies, spread the model over more nodes, or choose snapshot=none",
    )


def within_limit(limit: int | None, key: str, needed: int, advice: str) -> None:
    """Check that ``needed`` bytes do not exceed ``limit`` bytes. ``limit`` is the value of ``key``; None: no limit.
    The error message ends with ``advice``: what uses the memory, and how to use less."""
    if limit is not None and needed > limit:
        sizes = f"{memory_size(needed)} instead of {memory_size(limit)}"
        raise ConfigError.of(key, limit, f"must be at least {needed} ({sizes}), {advice}")

"""Host memory of every node for its own windows and for peer copies."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.operator_state import StateShard
from megatron_ft.planning.snapshot.peers import PeerAssignment
from megatron_ft.planning.snapshot.pieces import window_bytes
from megatron_ft.planning.snapshot.plan import WindowPlan

# These three are what the snapshot server allocates (``snapshot/server``), which planning does not import.
NUM_OWN_BUFFERS = 3
"""Buffers for a rank's windows: committed, being replicated, being captured."""
NUM_COPY_BUFFERS = 2
"""Buffers for copies of a peer's rank: committed, incoming."""
STATUS_BYTES = 4096
"""Size of the status page before a rank's buffers."""
_PAGE_BYTES = 4096
# A buffer that is too small for the next plan is replaced, and the windows in it are lost.
_MARGIN_FOR_OTHER_PLANS = (5, 4)
"""Ratio of the size of a buffer to the size of a window, if later plans may order operators differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Bytes of windows on one node."""

    own_bytes: int
    """Windows of the node's own ranks."""
    copies_bytes: int
    """Copies for other nodes."""
    device_bytes: int = 0
    """Memory on the devices: none, as slices are copied directly from the state."""

    @property
    def total_bytes(self) -> int:
        """Total host memory."""
        return self.own_bytes + self.copies_bytes


def host_bytes(
    plan: WindowPlan,
    shards_by_rank: Sequence[Sequence[StateShard]],
    ranks_per_node: int,
    assignment: PeerAssignment,
    *,
    plans_again: bool = False,
) -> tuple[NodeMemory, ...]:
    """Memory of every node."""
    num_nodes = len(assignment.peers)
    assert len(shards_by_rank) == num_nodes * ranks_per_node, f"{len(shards_by_rank)} ranks on {num_nodes} nodes"
    window = [buffer_bytes(plan, shards, plans_again=plans_again) for shards in shards_by_rank]
    by_node = [window[node * ranks_per_node : (node + 1) * ranks_per_node] for node in range(num_nodes)]
    return tuple(
        NodeMemory(
            own_bytes=sum(NUM_OWN_BUFFERS * num_bytes + STATUS_BYTES for num_bytes in by_node[node]),
            copies_bytes=sum(NUM_COPY_BUFFERS * sum(by_node[source]) for source in assignment.sources_of(node)),
        )
        for node in range(num_nodes)
    )


def buffer_bytes(plan: WindowPlan, shards: Sequence[StateShard], *, plans_again: bool) -> int:
    """Size of one buffer of the rank with ``shards``: a window, with a margin for later plans if ``plans_again``."""
    numerator, denominator = _MARGIN_FOR_OTHER_PLANS if plans_again else (1, 1)
    return _whole_pages(max(1, -(-window_bytes(plan, shards) * numerator // denominator)))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES

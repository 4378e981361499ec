"""Assigns peers as MoEtion does (section 5.1, algorithm 2). Jobs do not use this module; it is for comparison.

In MoEtion every worker captures its whole state. Data-parallel workers have some parts in common. A node needs fewer
peers for common parts, because other nodes have them. In this project, ranks divide common state, and each captures its
own part. No two nodes capture the same bytes, so jobs call ``PeerAssignment.of`` without ``already_held``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ft.planning.snapshot.memory import PeerAssignment
from megatron_ft.topology import Topology

Sharding = Literal["none", "zero1", "zero2", "zero3"]
"""State that data-parallel ranks divide among themselves. ``none``: nothing; ``zero1``: optimizer state (the
distributed optimizer); ``zero2``: also gradients; ``zero3``: also weights."""
Kind = Literal["weights", "optimizer", "expert_weights", "expert_optimizer"]
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "expert_weights", "expert_optimizer")


def is_divided(kind: Kind, sharding: Sharding) -> bool:
    """Return whether data-parallel ranks have different parts of the state of kind ``kind``. Gradients are not
    captured, so ``zero1`` and ``zero2`` give the same result."""
    return sharding == "zero3" or (sharding != "none" and kind.endswith("optimizer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Nodes to which each node sends copies of its state, for each kind of state."""

    by_kind: Mapping[Kind, PeerAssignment]
    sent_bytes: tuple[int, ...]
    """Bytes that each node sends for a snapshot."""

    @classmethod
    def of(
        cls,
        topology: Topology,
        node_of: Sequence[int],
        *,
        domains: Sequence[str],
        num_copies: int,
        sharding: Sharding,
        node_bytes: Mapping[Kind, Sequence[int]],
    ) -> "CopyPlan":
        """Assign peers for each kind of state. Nodes in the same data-parallel groups come first, in ring order.

        Args:
            node_of: node of each rank.
            domains: failure domain of each node.
            num_copies: number of other failure domains that must have the state of each node (r).
            node_bytes: bytes of each kind that each node captures.

        Raises:
            ConfigError: the number of failure domains is not above ``num_copies``.
        """
        by_kind: dict[Kind, PeerAssignment] = {}
        sent = [0] * len(domains)
        for kind in KINDS:
            equal = _nodes_with_equal_parts(topology, node_of, kind)
            held = {} if is_divided(kind, sharding) else equal
            by_kind[kind] = PeerAssignment.of(domains, num_copies, held, near=equal)
            by_kind[kind].validate()
            for node, peers in enumerate(by_kind[kind].peers):
                sent[node] += len(peers) * node_bytes[kind][node]
        return cls(by_kind=by_kind, sent_bytes=tuple(sent))


def _nodes_with_equal_parts(topology: Topology, node_of: Sequence[int], kind: Kind) -> dict[int, frozenset[int]]:
    """Return, for each node A, the other nodes that also have A's whole state of ``kind``: nodes that have a rank in
    the data-parallel group of every rank of A."""
    groups: dict[tuple[int, ...], set[int]] = {}
    keys: dict[int, set[tuple[int, ...]]] = {}
    for rank, place in topology.ranks():
        # Expert-parallel ranks have different experts; all other state is equal for the same tensor-parallel rank.
        # Within a stage, expert-tensor-parallel ranks vary fastest.
        expert_part = rank % topology.expert_tensor_parallel_size, place.ep
        key = (place.pp, *expert_part) if kind.startswith("expert") else (place.pp, place.tp)
        groups.setdefault(key, set()).add(node_of[rank])
        keys.setdefault(node_of[rank], set()).add(key)
    return {
        node: frozenset(set.intersection(*(groups[key] for key in of_node)) - {node}) for node, of_node in keys.items()
    }

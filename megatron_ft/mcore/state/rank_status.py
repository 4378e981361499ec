"""The state of each rank and its placement; choice of the holding from which all ranks continue. Pure."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.moe.placement_manager import PlacementState

Key = tuple[int, bool]
"""Generation, and whether experts have moved in it for the ranks that stay; later keys are greater."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Record that a rank has all the state that ``placement`` gives it.

    A rank can have several holdings of one iteration: that of the membership that committed the iteration, one of each
    membership that was formed since and broke before it committed another, and one of an evacuation.
    """

    generation: int
    """Membership of the placement."""
    is_evacuation: bool = False
    """Whether the placement was made for the ranks that stay in the next membership."""
    rank: int
    """Number of the rank in that membership."""
    nodes: tuple[int, ...]
    """Node of each rank of that membership."""
    placement: PlacementState | None
    """None if experts stay where Megatron puts them."""
    changes: tuple[str, ...] = ()
    """The memberships since the commit, as entries of ``testing.membership_schedule``."""

    @property
    def key(self) -> Key:
        """Key that is the same on all ranks with this holding."""
        return self.generation, self.is_evacuation

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "generation": self.generation,
            "is_evacuation": self.is_evacuation,
            "rank": self.rank,
            "nodes": list(self.nodes),
            "placement": None if self.placement is None else self.placement.to_json(),
            "changes": list(self.changes),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Holding":
        """Read the values of ``to_json``."""
        placement = content["placement"]
        lists = {name: tuple(content[name]) for name in ("nodes", "changes")}
        return cls(
            **{**content, **lists, "placement": None if placement is None else PlacementState.from_json(placement)}
        )


Previous = tuple[int | None, ...]
"""Number of each rank of a membership in the holding from which all continue; None if it is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Holdings of a rank with state, as reported to the others."""

    holdings: tuple[tuple[Key, int, str], ...]
    """Key of each holding, the rank's number in it, and the digest of its placement."""

    @classmethod
    def of(cls, holdings: Sequence[Holding]) -> "RankStatus":
        """Summarize ``holdings``."""
        return cls(holdings=tuple((held.key, held.rank, digest_of(held.placement)) for held in holdings))

    def rank_in(self, key: Key) -> int | None:
        """Return the rank's number in a holding; None if it does not have it."""
        return next((rank for found, rank, _ in self.holdings if found == key), None)

    def to_json(self) -> list[Any]:
        """Return JSON values."""
        return [[list(key), rank, digest] for key, rank, digest in self.holdings]

    @classmethod
    def from_json(cls, content: list[Any]) -> "RankStatus":
        """Read the values of ``to_json``."""
        return cls(holdings=tuple(((key[0], key[1]), rank, digest) for key, rank, digest in content))


def digest_of(placement: PlacementState | None) -> str:
    """Return the hexadecimal SHA-256 of a placement's JSON."""
    content = None if placement is None else placement.to_json()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def choose_holding(
    present: Sequence[RankStatus | None],
    nodes: Sequence[int],
    generation: int,
    *,
    is_whole: Callable[[Key, Previous], bool],
) -> tuple[Key, Previous]:
    """Choose the holding from which a membership continues; the result is the same on every rank.

    It is the newest holding that every rank with state has: then all of them had formed that membership. If no holding
    is common to all, some had formed the newest membership and others had not, and all return to the oldest, which they
    carried into it. In both cases a holding with missing experts is skipped in favour of the next one without.

    Args:
        present: status of each rank of membership ``generation``; None for joining ranks.
        nodes: node of each rank. If a rank of a node lacks a holding, the whole node is not in it.
        is_whole: whether the ranks with a holding hold every expert; called on every rank in the same order, and only
            if there is a choice.

    Raises:
        RecoveryError: no rank has state, or ranks have different placements of one holding.
    """
    known = [presence for presence in present if presence is not None]
    if not known:
        raise RecoveryError(f"generation {generation}: every rank with state is lost")
    keys = sorted({key for presence in known for key, _, _ in presence.holdings})
    # Every rank with state has formed such a membership, so nothing that it transferred is missing.
    shared = [key for key in keys if all(presence.rank_in(key) is not None for presence in known)]
    order = [*reversed(shared), *(key for key in keys if key not in shared)]
    found = {key: _previous(present, nodes, key) for key in order}
    order = [key for key in order if any(rank is not None for rank in found[key])]
    if not order:
        raise RecoveryError(f"generation {generation}: on every node some rank has no state")
    # ``is_whole`` is collective: all ranks have the same reports, so they ask about the same holdings in order.
    if len(order) > 1:
        order = [key for key in order if is_whole(key, found[key])] or order
    _check_alike(present, order[0], generation)
    return order[0], found[order[0]]


def _previous(present: Sequence[RankStatus | None], nodes: Sequence[int], key: Key) -> Previous:
    ranks = [None if presence is None else presence.rank_in(key) for presence in present]
    # A node joins as a whole: the entry of a schedule that repeats this history names nodes.
    lacking = {node for node, rank in zip(nodes, ranks, strict=True) if rank is None}
    return tuple(None if node in lacking else rank for node, rank in zip(nodes, ranks, strict=True))


def _check_alike(present: Sequence[RankStatus | None], key: Key, generation: int) -> None:
    chosen = {
        rank: digest
        for rank, presence in enumerate(present)
        if presence is not None
        for found, _, digest in presence.holdings
        if found == key
    }
    if len(set(chosen.values())) > 1:
        digests = ", ".join(f"rank {rank} from {digest[:12]}" for rank, digest in chosen.items())
        raise RecoveryError(f"generation {generation}: all ranks must continue from the same placement: {digests}")

"""Describes progress and state of each rank, and chooses the state from which all ranks continue. Finishes or rolls
back an interrupted iteration to bring a rank to this state."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.moe.placement_manager import PlacementState
from megatron_ft.mcore.state.train_state import IterationResult
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.iteration import RankFigures
from megatron_ft.planning.recovery.membership import Position, Target


def position_of(engine: TrainingEngine, rank: int) -> Position:
    """Return the position of ``rank``, whose engine is ``engine``: the newest iteration that the rank has completed,
    the newest iteration on which it has voted, and the newest complete vote that it knows.

    Raises:
        RecoveryError: an iteration failed in the middle of its update, so the state is unusable.
    """
    completed, contributed, vote = engine.iteration, engine.iteration, engine.newest_vote
    in_progress = engine.in_progress
    if in_progress is not None:
        # Only some master weights are updated, and ``TrainState`` cannot restore them.
        if in_progress.update == "begun":
            raise RecoveryError(
                f"rank {rank}: iteration {in_progress.iteration} failed in the middle of its update, so the state of "
                "this rank is unusable"
            )
        # This rank has updated its own state. With a sharded optimizer, weights may still have to be gathered.
        if in_progress.update == "done":
            completed = in_progress.iteration
        if in_progress.contributed:
            contributed = in_progress.iteration
        vote = in_progress.vote or vote
    return Position(
        rank=rank, generation=engine.groups.generation, completed=completed, contributed=contributed, vote=vote
    )


def resolve_iteration(engine: TrainingEngine, target: Target) -> IterationResult | None:
    """Finish or roll back the iteration in progress, so that ``engine`` has the state after the target's iteration.

    This needs no communication, because the gradients still exist. Later, the caller must gather the parameters of a
    sharded optimizer.

    Returns:
        Result of the finished iteration; None if no iteration was finished.
    """
    in_progress = engine.in_progress
    if in_progress is None or in_progress.iteration != target.iteration:
        assert engine.iteration == target.iteration, (
            f"this rank is at iteration {engine.iteration}, but the target is iteration {target.iteration}"
        )
        engine.abort()
        return None
    # If the target has no vote, all ranks have completed its iteration, so this rank knows the vote of the iteration.
    vote = target.vote or in_progress.vote
    assert vote is not None and in_progress.contributed, (
        f"this rank has no ballot or no vote of iteration {target.iteration}"
    )
    began, seconds = time.perf_counter(), in_progress.seconds
    # Leave out the values of single ranks, because ranks may be renumbered before the result is reported.
    result = replace(engine.decide(vote), of_ranks=RankFigures())
    # A skip or a stop may have been applied before the failure. Both restore recorded values, so they can be repeated.
    if in_progress.update == "none":
        engine.apply(result)
    if result.decision.action != "stop":
        engine.finish(vote, result.decision)
    # Leave out the time from the failure until now, because the recovery is reported on its own.
    return replace(result, seconds=seconds + time.perf_counter() - began)


Key = tuple[int, bool]
"""Key of a holding (record of a rank's state): ``generation`` and ``is_evacuation``; greater for newer holdings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Record that a rank has all state that one placement assigns to it, after the newest committed iteration.

    A rank can have several holdings: from the membership that committed the iteration, from an evacuation (see
    ``is_evacuation``), and from later memberships, if these failed before they committed an iteration.
    """

    generation: int
    """Generation of the membership that uses the placement."""
    is_evacuation: bool = False
    """Whether the placement is the result of an evacuation: a migration of all experts to the ranks that stay."""
    rank: int
    """Rank of this process in the membership with number ``generation``."""
    part: int = 0
    """Model part of this rank in the membership with number ``generation``, see ``Topology.model_parts``."""
    nodes: tuple[int, ...]
    """Nodes of the membership with number ``generation``."""
    placement: PlacementState | None
    """Placement of the experts; None if Megatron assigns experts to ranks."""
    changes: tuple[str, ...] = ()
    """Changes of membership since the newest committed iteration, as entries of ``testing.membership_schedule``."""

    @property
    def key(self) -> Key:
        """Key of the holding: (generation, is_evacuation). All ranks with the same holding have the same key."""
        return self.generation, self.is_evacuation

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "is_evacuation": self.is_evacuation,
            "rank": self.rank,
            "part": self.part,
            "nodes": list(self.nodes),
            "placement": None if self.placement is None else self.placement.to_json(),
            "changes": list(self.changes),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Holding":
        placement = content["placement"]
        lists = {name: tuple(content[name]) for name in ("nodes", "changes")}
        return cls(
            **{**content, **lists, "placement": None if placement is None else PlacementState.from_json(placement)}
        )


Previous = tuple[int | None, ...]
"""Former rank of each rank of a new membership: ``Holding.rank`` of the holding from which the membership
continues. None for a rank without this holding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Summary of a rank's holdings (records of its state). The ranks exchange their summaries."""

    holdings: tuple[tuple[Key, int, int, str], ...] = ()
    """One row (key, rank, part, digest of the placement) per ``Holding``; empty on a rank without state."""
    spared: tuple[int, ...] = ()
    """Generations in which this process was a hot spare (had no rank), so it has no holdings of them."""

    @classmethod
    def of(cls, holdings: Sequence[Holding], spared: Sequence[int] = ()) -> "RankStatus":
        """Create the summary of ``holdings``."""
        rows = tuple((held.key, held.rank, held.part, _digest_of(held.placement)) for held in holdings)
        return cls(holdings=rows, spared=tuple(spared))

    def rank_in(self, key: Key) -> int | None:
        """Return ``Holding.rank`` of the holding with ``key``, or None if this rank does not have it."""
        return next((rank for found, rank, _, _ in self.holdings if found == key), None)

    def part_in(self, key: Key) -> int | None:
        """Return ``Holding.part`` of the holding with ``key``, or None if this rank does not have it."""
        return next((part for found, _, part, _ in self.holdings if found == key), None)

    def to_json(self) -> dict[str, Any]:
        return {"holdings": [[list(row[0]), *row[1:]] for row in self.holdings], "spared": list(self.spared)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "RankStatus":
        rows = tuple(((key[0], key[1]), rank, part, digest) for key, rank, part, digest in content["holdings"])
        return cls(holdings=rows, spared=tuple(content["spared"]))


def _digest_of(placement: PlacementState | None) -> str:
    """Return the SHA-256 of the JSON form of ``placement``, as a hexadecimal number."""
    content = None if placement is None else placement.to_json()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def choose_holding(
    present: Sequence[RankStatus],
    nodes: Sequence[int],
    generation: int,
    *,
    is_whole: Callable[[Key, Previous], bool],
) -> tuple[Key, Previous]:
    """Choose the holding (record of state) from which a membership continues. The result is equal on all ranks.

    The first choice is the newest holding that every rank with state has. If no holding is common to these ranks, the
    oldest holding is chosen, because only some ranks have received the whole state of later memberships. A holding
    whose ranks together lack an expert or a model part is used only if every holding has such a gap.

    Args:
        present: status of each rank of membership ``generation``.
        nodes: node number of each rank. If one rank of a node lacks a holding, all ranks of the node count as lacking
            it. A rank that was a hot spare in the holding's membership does not count as lacking it.
        is_whole: returns whether the ranks with a holding have every expert and every model part. It is called only if
            there are several holdings, in the same order on every rank.

    Returns:
        The key of the holding, and for each rank of the membership its rank in the holding, or None.

    Raises:
        RecoveryError: no rank has state, or ranks have different placements for the same holding.
    """
    known = [presence for presence in present if presence.holdings]
    if not known:
        raise RecoveryError(f"generation {generation}: all ranks that had state are lost")
    keys = sorted({key for presence in known for key, *_ in presence.holdings})
    # Every rank with state has all state of these holdings, so nothing is missing in them.
    shared = [key for key in keys if all(presence.rank_in(key) is not None for presence in known)]
    order = [*reversed(shared), *(key for key in keys if key not in shared)]
    found = {key: _previous(present, nodes, key) for key in order}
    order = [key for key in order if any(rank is not None for rank in found[key])]
    if not order:
        raise RecoveryError(
            f"generation {generation} cannot be formed: it needs a node whose ranks all have the same state, but there "
            "is no such node; start all ranks again with run.resume=auto"
        )
    # ``is_whole`` is collective. All ranks have the same ``present``, so they make the same calls in the same order.
    if len(order) > 1:
        order = [key for key in order if is_whole(key, found[key])] or order
    _check_alike(present, order[0], generation)
    return order[0], found[order[0]]


def _previous(present: Sequence[RankStatus], nodes: Sequence[int], key: Key) -> Previous:
    ranks = [presence.rank_in(key) for presence in present]
    # All ranks of a node join together, because ``testing.membership_schedule`` names nodes, not ranks.
    lacking = {
        node
        for node, rank, presence in zip(nodes, ranks, present, strict=True)
        if rank is None and key[0] not in presence.spared
    }
    return tuple(None if node in lacking else rank for node, rank in zip(nodes, ranks, strict=True))


def _check_alike(present: Sequence[RankStatus], key: Key, generation: int) -> None:
    chosen = {
        rank: digest
        for rank, presence in enumerate(present)
        for found, _, _, digest in presence.holdings
        if found == key
    }
    if len(set(chosen.values())) > 1:
        digests = ", ".join(f"rank {rank} {digest[:12]}" for rank, digest in chosen.items())
        raise RecoveryError(
            f"generation {generation}: all ranks must have the same placement of experts, but its checksums differ: "
            f"{digests}; start all ranks again with run.resume=auto"
        )

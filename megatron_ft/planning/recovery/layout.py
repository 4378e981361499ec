"""Parallel layout of the living processes after a loss: the same, or with fewer or more lanes. TP, CP and PP stay.

Processes have numbers that do not change with the membership: those in ``former`` for its members, others for processes
that have joined since.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.state.parallel_layout import Group, ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """Numbers of lanes that a job may have."""

    most: int
    """Number of lanes that was configured."""
    multiple: int = 1
    """The number of lanes must be a multiple of this: the lanes that Megatron's expert groups span, if experts have no
    slots."""
    fewest: int = 1
    """Smallest number of lanes with a slot for every expert."""
    num_expert_ranks: int | None = None
    """EP times expert TP, if experts have no slots: ranks of a stage whose numbers differ by this hold the same
    experts."""
    optimizer_bytes: tuple[int, int] = (1, 1)
    """Optimizer bytes of a stage without its experts, and of its experts; their ratio decides between lanes."""

    @classmethod
    def of(
        cls,
        layout: ParallelLayout,
        most: int,
        *,
        num_expert_ranks: int = 1,
        num_experts: int = 0,
        num_slots_per_rank: int | None = None,
        optimizer_bytes: tuple[int, int] = (1, 1),
    ) -> "LaneLimits":
        """Return the limits of a job with groups like those of ``layout``.

        Args:
            num_expert_ranks: EP times expert TP, for a job without slots.
            num_slots_per_rank: for a job whose experts are placed in slots.
        """
        size = layout.group_size
        if num_slots_per_rank is None:
            return cls(
                most=most,
                multiple=num_expert_ranks // gcd(num_expert_ranks, size),
                num_expert_ranks=num_expert_ranks,
                optimizer_bytes=optimizer_bytes,
            )
        return cls(most=most, fewest=max(1, -(-num_experts // (num_slots_per_rank * size))))


@dataclass(frozen=True, slots=True)
class _Group:
    """A TP·CP group that can train, and the group whose state its ranks have."""

    ranks: Group
    stage: int | None = None
    lane: int = -1


def choose_layout(
    former: ParallelLayout, living: Collection[int], node_of: Mapping[int, int], limits: LaneLimits
) -> ParallelLayout | Declined:
    """Choose the layout with which ``living`` continue.

    If there are enough hot spares, they take the lost places and the layout stays. Otherwise there are as many lanes as
    whole groups allow: groups whose members all live, and groups made of other living processes of one node. Groups
    keep their stage and the experts of their lane if possible, and get lanes in their previous order, so that most
    optimizer state stays where it is. Incomplete and surplus groups become hot spares.

    Args:
        former: the layout that committed the newest iteration.
        living: processes that continue: members of ``former``, its spares, and new ones, without leaving ones.
        node_of: node of every process, lost ones included.
    """
    # Everything below depends on sorted numbers only: each rank computes the layout by itself, and all must agree.
    alive = set(living)
    free = sorted(alive - set(former.ranks), key=lambda rank: (node_of[rank], rank))
    groups = [
        [_Group(group, stage, lane) for lane, group in enumerate(in_stage)]
        for stage, in_stage in enumerate(former.stages)
    ]
    substitutes = _substitutes(former, alive, free, node_of)
    whole = []
    for group in (group for in_stage in groups for group in in_stage):
        filled = tuple(rank if rank in alive else substitutes.get(rank, -1) for rank in group.ranks)
        if -1 not in filled:
            whole.append(replace(group, ranks=filled))
    placed = {rank for group in whole for rank in group.ranks}
    left = [rank for rank in alive if rank not in placed]
    whole += _formed(former, left, node_of)
    possible = min(limits.most, len(whole) // former.num_stages)
    # Lanes beyond a multiple would leave an expert group without some of its experts.
    num_lanes = possible - possible % limits.multiple
    if num_lanes < max(1, limits.fewest):
        return Declined(reason=_too_few(former, len(whole), len(alive), limits))
    return _arranged(former, whole, num_lanes, limits, alive)


def _too_few(former: ParallelLayout, num_groups: int, num_alive: int, limits: LaneLimits) -> str:
    fewest = -(-max(1, limits.fewest) // limits.multiple) * limits.multiple
    return (
        f"{num_alive} living ranks have {num_groups} whole groups of TP * CP = {former.group_size} ranks, but "
        f"{fewest * former.num_stages} are needed: {fewest} lanes of {former.num_stages} pipeline stages"
    )


def _substitutes(
    former: ParallelLayout, alive: Collection[int], free: Sequence[int], node_of: Mapping[int, int]
) -> dict[int, int]:
    """Choose the replacement of each lost rank: a process of the same node, else spare nodes, one for each lost node.
    If there are too few, only processes of the same node complete their groups."""
    lost = sorted((rank for rank in former.ranks if rank not in alive), key=lambda rank: (node_of[rank], rank))
    by_node: dict[int, list[int]] = {}
    for rank in free:
        by_node.setdefault(node_of[rank], []).append(rank)
    found = {}
    for rank in lost:
        if by_node.get(node_of[rank]):
            found[rank] = by_node[node_of[rank]].pop(0)
    # The layout cannot stay, so spare nodes are not scattered over groups: they form whole groups of their own.
    if len(free) < len(lost):
        return found
    lost_by_node: dict[int, list[int]] = {}
    for rank in lost:
        if rank not in found:
            lost_by_node.setdefault(node_of[rank], []).append(rank)
    for ranks in lost_by_node.values():
        # One node for one lost node, so that groups that lay within a node still do.
        wide = (node for node, spares in sorted(by_node.items()) if len(spares) >= len(ranks))
        chosen = next(wide, None)
        pool = by_node[chosen] if chosen is not None else [rank for spares in by_node.values() for rank in spares]
        for rank, spare in zip(ranks, list(pool), strict=False):
            found[rank] = spare
            by_node[node_of[spare]].remove(spare)
    return found


def _formed(former: ParallelLayout, left: Iterable[int], node_of: Mapping[int, int]) -> list[_Group]:
    places = former.places()
    size = former.group_size
    per_node: dict[int, int] = {}
    for node in node_of.values():
        per_node[node] = per_node.get(node, 0) + 1
    by_node: dict[int, list[int]] = {}
    for rank in sorted(left, key=lambda rank: (node_of[rank], rank)):
        # Where no node has room for a group, groups have always spanned nodes.
        by_node.setdefault(node_of[rank] if size <= max(per_node.values()) else 0, []).append(rank)
    found = []
    for ranks in by_node.values():
        by_place: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            if rank in places:
                stage, _, place = places[rank]
                by_place.setdefault((stage, place), []).append(rank)
        rest = set(ranks)
        for stage in range(former.num_stages):  # halves of one stage make a group that has its weights
            for members in zip(*(by_place.get((stage, place), []) for place in range(size)), strict=False):
                found.append(_Group(members, stage, places[members[0]][1]))
                rest -= set(members)
        blank = sorted(rest)
        found += [_Group(tuple(blank[i : i + size])) for i in range(0, len(blank) - size + 1, size)]
    return found


def _arranged(
    former: ParallelLayout, groups: Sequence[_Group], num_lanes: int, limits: LaneLimits, alive: Collection[int]
) -> ParallelLayout:
    """Assign groups to (stage, lane): to their previous place if possible, then to places without a group."""
    stages: list[list[Group | None]] = []
    pool = [group for group in groups if group.stage is None]
    surplus: list[_Group] = []
    for stage in range(former.num_stages):
        members = sorted((g for g in groups if g.stage == stage), key=lambda group: (group.lane, group.ranks))
        lanes, left = _lanes_of(members, _Overlap(former.num_lanes, num_lanes, former.group_size, limits))
        stages.append(lanes)
        surplus += left
    pool = sorted(pool, key=lambda group: group.ranks) + surplus
    fillers = iter(pool)
    filled = tuple(tuple(next(fillers).ranks if group is None else group for group in lanes) for lanes in stages)
    placed = {rank for lanes in filled for group in lanes for rank in group}
    result = replace(former, stages=filled, spares=tuple(sorted(set(alive) - placed)))
    result.validate()
    return result


def _lanes_of(members: Sequence[_Group], overlap: "_Overlap") -> tuple[list[Group | None], list[_Group]]:
    """Return a stage's lanes with its own groups, and its groups without a lane.

    Lanes that differ by a multiple of the period hold the same experts. Weights of experts have more bytes than shards
    of optimizer state, so groups keep such a lane if they can.
    """
    num_lanes, period = overlap.num_lanes, overlap.limits.multiple
    lanes: list[Group | None] = [None] * num_lanes
    left: list[_Group] = []
    for offset in range(period):
        alike = [group for group in members if group.lane % period == offset]
        chosen = _in_order([group.lane for group in alike], overlap, offset)
        for place, lane in chosen.items():
            lanes[lane] = alike[place].ranks
        others = [group for place, group in enumerate(alike) if place not in chosen]
        empty = [lane for lane in range(offset, num_lanes, period) if lanes[lane] is None]
        for lane, group in zip(empty, others, strict=False):
            lanes[lane] = group.ranks
        left += others[len(empty) :]
    empty = [lane for lane in range(num_lanes) if lanes[lane] is None]
    for lane, group in zip(empty, left, strict=False):
        lanes[lane] = group.ranks
    return lanes, left[len(empty) :]


def _in_order(before: Sequence[int], overlap: "_Overlap", offset: int) -> dict[int, int]:
    """Return a lane for each place in ``before`` (ascending former lanes), ascending too, so that most optimizer state
    stays.

    A lane's optimizer shard is its fraction of each bucket, so lanes share state if their fractions overlap. Each
    former lane overlaps with few new ones; among these the heaviest ascending chain is found in O(n log n).
    """
    num_before, num_lanes, period = overlap.num_before, overlap.num_lanes, overlap.limits.multiple
    best = _PrefixMaximum(num_lanes)
    chains: list[tuple[int, int, int]] = []  # (place, lane, chain before it)
    for place, lane in enumerate(before):
        first = lane * num_lanes // num_before - period
        last = -(-(lane + 1) * num_lanes // num_before) + period
        found = []
        for new in range(max(0, first), min(num_lanes, last)):
            weight = overlap.weight(lane, new) if new % period == offset else 0
            if weight:
                # Lanes rise with former lanes, so each chain continues below ``new``.
                total, chain = best.below(new)
                found.append((total + weight, new, chain))
        for total, new, chain in found:  # after all were asked: a group has one lane
            chains.append((place, new, chain))
            best.raise_to(new, total, len(chains) - 1)
    chosen = {}
    _, chain = best.below(num_lanes)
    while chain >= 0:
        place, lane, chain = chains[chain]
        chosen[place] = lane
    return chosen


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The parts of its optimizer shards that a group of a former lane keeps at a new lane."""

    num_before: int
    num_lanes: int
    group_size: int
    limits: LaneLimits

    def weight(self, lane: int, new: int) -> int:
        """Return the bytes that stay, up to a common factor; a shard is the same fraction of every bucket."""
        dense_bytes, expert_bytes = self.limits.optimizer_bytes
        dense = _shared(lane, self.num_before, new, self.num_lanes)
        every = self.limits.num_expert_ranks
        if every is None:
            return dense
        before, after = self.num_before * self.group_size // every, self.num_lanes * self.group_size // every
        expert = 0
        for place in range(self.group_size):
            (block, part), (new_block, new_part) = (divmod(at * self.group_size + place, every) for at in (lane, new))
            expert += _shared(block, before, new_block, after) if part == new_part else 0
        # Of the one a lane has a part per lane, of the other a part per block and class: one common denominator.
        return dense * dense_bytes * before * after * every + expert * expert_bytes * self.num_before * self.num_lanes


def _shared(part: int, num_parts: int, other: int, num_others: int) -> int:
    low, high = max(part * num_others, other * num_parts), min((part + 1) * num_others, (other + 1) * num_parts)
    return max(0, high - low)


class _PrefixMaximum:
    """Largest value below a place, with its source, in O(log n); values and places ascend as lanes are tried."""

    def __init__(self, size: int) -> None:
        self._places: list[int] = []
        self._values: list[tuple[int, int]] = []
        self._size = size

    def below(self, place: int) -> tuple[int, int]:
        """Return the largest value at a place before ``place``, and its source; (0, -1) if there is none."""
        found = bisect_left(self._places, place)
        return self._values[found - 1] if found else (0, -1)

    def raise_to(self, place: int, value: int, source: int) -> None:
        """Set a place's value if it is larger than all before it, and remove smaller ones after it."""
        assert 0 <= place < self._size, f"place {place} of {self._size}"
        at = bisect_left(self._places, place + 1)
        if at and self._values[at - 1][0] >= value:
            return
        end = at
        start = at - 1 if at and self._places[at - 1] == place else at
        while end < len(self._places) and self._values[end][0] <= value:
            end += 1
        self._places[start:end] = [place]
        self._values[start:end] = [(value, source)]

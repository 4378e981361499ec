"""Searches a placement of expert replicas. Base copies, by default equally many of each expert, are placed so that the
experts survive losses of domains at least as often as with maximum rank overlap. Extra copies are placed by load."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, combinations_with_replacement
from typing import ClassVar

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.algorithm import PlacementBase, spread_to_floor
from megatron_ft.planning.placement.allocation import add_extra_copies, base_capacities, base_counts, match_domains
from megatron_ft.planning.placement.layout import (
    Counts,
    Holdings,
    Layout,
    busiest_tokens,
    copies_per_rank,
    even_tokens,
    per_replica_loads,
)
from megatron_ft.planning.placement.local_search import EPSILON, Bools, Losses, Search, support_masks
from megatron_ft.planning.placement.maximum_rank_overlap import group_sizes, overlap, overlap_groups
from megatron_ft.planning.placement.plan import Slots
from megatron_ft.planning.placement.survival import SurvivalObjective, TooManyStates

WORTH_MOVING = 0.02
"""Extra copies move only if a layer's busiest rank then has fewer tokens, by more than this fraction."""
MAX_BALANCED_RANKS = 256
"""Largest number of ranks for which the search computes balanced shares; with more ranks, it computes even shares."""
MAX_SEARCHED_DOMAINS = 62
MAX_SWEEPS = 4
"""Largest number of times that ``_align`` goes through all layers to exchange domains."""
MAX_EXCHANGES = 100
NEGLIGIBLE = 1e-9
"""Smallest gain for which ``_even_out`` makes an exchange. The gain is the decrease of the sum of squared domain loads,
divided by the square of the total load."""
Column = tuple[int, ...]
"""Ids of the experts in the slots of one domain, ascending. With E experts, an empty slot has the id E."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSearch(PlacementBase):
    """Searches for domains in which base copies survive at least as many losses as with maximum rank overlap. Places
    extra copies by load.

    * Every expert is in at least ``min_domains`` failure domains, or in as many as its replicas and the cluster allow.
    * If loads are given, and experts have more replicas than base copies, only base copies are placed for survival. All
      other copies are extra copies, placed by load (``allocation.py``). ``survival_share`` divides the slots between
      base copies and extra copies.
    * If a domain has slots for all experts, or its number of slots divides the number of experts, maximum rank overlap
      is optimal and is used. Otherwise, a small layer is solved by enumeration of all placements, a medium layer by
      exchanges of replicas, and a large layer by the best of several groupings.
    * The domains of each layer are then permuted so that all layers survive together as often as possible.
    """

    name: ClassVar[str] = "overlap_search"
    objective: SurvivalObjective = field(default_factory=SurvivalObjective)
    min_domains: int | None = None
    """Minimum number of distinct failure domains of an expert; None for the smallest replica count of the layer."""
    num_exhaustive_slots: int = 15
    """Largest number of slots of a layer that is solved by enumeration."""
    num_losses: int = 1024
    """Largest number of losses (sets of lost domains) for which an exchange is evaluated, smallest sets first."""
    num_kicks: int = 4
    """Number of times that the search starts again from the best placement, after random exchanges."""
    seed: int = 0
    balance: bool = True
    """Whether the search also evens out the loads of failure domains; this requires ``loads``."""
    survival_share: float = 0.0
    """Share of the slots for base copies, which are placed so that experts survive losses. Other copies are placed
    by load. At least ``min_replicas`` copies of every expert are base copies. Without loads, all copies are."""

    def fill(
        self,
        layout: Layout,
        replica_counts: Sequence[Sequence[int]],
        loads: Sequence[Sequence[float] | None],
        min_replicas: int | None,
        previous: Holdings | None,
    ) -> Slots:
        capacities = layout.capacities()
        self._check(len(capacities))
        base = self._base(replica_counts, capacities, loads, min_replicas)
        if base is None:
            return PlacementBase.fill(self, layout, replica_counts, loads, min_replicas, previous)
        before = None
        if previous is not None:
            before = [copies_per_rank(held, len(base[0]), layout.domain_of) for held in previous]
            base = match_domains(base, before, capacities)
        slots = []
        for position, (copies, counts, load) in enumerate(zip(base, replica_counts, loads, strict=True)):
            assert load is not None, "extra copies are placed by load, so every layer must have loads"
            chosen = layout.deal(add_extra_copies(copies, counts, capacities, load), load)
            if previous is not None and before is not None:
                kept = add_extra_copies(copies, counts, capacities, load, before[position])
                chosen = _cheaper(layout.deal(kept, load, previous[position]), chosen, load)
            slots.append(chosen)
        return tuple(slots)

    def assign_layers(
        self,
        replica_counts: Sequence[Sequence[int]],
        capacities: Sequence[int],
        loads: Sequence[Sequence[float] | None],
    ) -> list[Counts]:
        self._check(len(capacities))
        losses = self._losses(len(capacities))
        layers = [
            self.assign(counts, capacities, load, losses) for counts, load in zip(replica_counts, loads, strict=True)
        ]
        # A single layer needs no alignment. With very many domains, ``losses`` is None: no exchange can be evaluated.
        if losses is not None and len(layers) > 1:
            layers = self._joint(layers, replica_counts, capacities, loads, losses)
        return layers

    def _check(self, num_domains: int) -> None:
        self.objective.validate(num_domains)
        if not 0 <= self.survival_share <= 1:
            raise ConfigError.of("survival_share", self.survival_share, "must be from 0 to 1")

    def _base(
        self,
        replica_counts: Sequence[Sequence[int]],
        capacities: Sequence[int],
        loads: Sequence[Sequence[float] | None],
        min_replicas: int | None,
    ) -> list[Counts] | None:
        """Return the base copies of each layer, ``[L][E, D]``. Return None if all copies are base copies: if
        ``survival_share`` is 1, the loads of a layer are missing, or the replica counts leave no extra copies."""
        if self.survival_share == 1 or any(load is None for load in loads):
            return None
        floor = min([*map(min, replica_counts), *([] if min_replicas is None else [min_replicas])])
        num_base = max(floor * len(replica_counts[0]), int(self.survival_share * sum(capacities)))
        base = tuple(base_counts(counts, floor, num_base) for counts in replica_counts)
        if all(tuple(counts) == copies for counts, copies in zip(replica_counts, base, strict=True)):
            return None
        distinct = tuple(dict.fromkeys(base))
        found = dict(zip(distinct, search_base(self, distinct, base_capacities(capacities, num_base)), strict=True))
        return [found[copies] for copies in base]

    def assign(
        self,
        replica_counts: Sequence[int],
        capacities: Sequence[int],
        loads: Sequence[float] | None = None,
        losses: Losses | None = None,
    ) -> Counts:
        """Return the number of replicas of each expert in each domain for one layer, ``[E, D]``."""
        floor = self._floor(replica_counts)
        found = self._search(replica_counts, capacities, floor, loads, losses)
        if loads is None or not self.balance:
            return found
        return self._even_out(found, capacities, floor, loads, losses or self._losses(len(capacities)))

    def _even_out(
        self, counts: Counts, capacities: Sequence[int], floor: int, loads: Sequence[float], losses: Losses | None
    ) -> Counts:
        evened = _even_out(counts, loads)
        if losses is None:
            return evened
        search = Search(evened, capacities, floor, losses, per_replica_loads(evened, loads))
        search.even_out(search.score)
        polished = search.result()
        # The search evaluates only some losses, so its result may be worse if all losses are counted.
        return polished if self._score([polished]) >= self._score([evened]) - EPSILON else evened

    def _floor(self, replica_counts: Sequence[int]) -> int:
        return min(replica_counts) if self.min_domains is None else self.min_domains

    def _search(
        self,
        replica_counts: Sequence[int],
        capacities: Sequence[int],
        floor: int,
        loads: Sequence[float] | None,
        losses: Losses | None,
    ) -> Counts:
        built = overlap(replica_counts, capacities, loads)
        start = spread_to_floor(built, floor)
        if self._known_best(replica_counts, capacities) and (start == built).all():
            return start
        if self._solvable(capacities):
            return self._solve(replica_counts, capacities, floor, start)
        losses = losses or self._losses(len(capacities))
        starts = self._starts(replica_counts, capacities, floor, loads, start)
        if losses is None:
            return starts[0]
        found = self._improve(starts, capacities, floor, losses)
        # The result must never survive less often than maximum rank overlap.
        return found if self._score([found]) >= self._score([start]) - EPSILON else start

    def _known_best(self, replica_counts: Sequence[int], capacities: Sequence[int]) -> bool:
        num_slots = capacities[0]
        divides = len(replica_counts) <= num_slots or len(replica_counts) % num_slots == 0
        full = sum(replica_counts) == sum(capacities)
        return divides and full and len(set(capacities)) == 1 and not self.objective.failure_rates

    def _solvable(self, capacities: Sequence[int]) -> bool:
        equal = len(set(capacities)) == 1 and not self.objective.failure_rates
        return equal and sum(capacities) <= self.num_exhaustive_slots

    def _solve(self, replica_counts: Sequence[int], capacities: Sequence[int], floor: int, start: Counts) -> Counts:
        # Returns the best of all placements; ``start`` if none is better.
        # All sets of lost domains are evaluated: the enumeration of placements is exact only if their scores are exact.
        losses = self._losses(len(capacities), limit=1 << len(capacities))
        assert losses is not None, f"losses of {len(capacities)} domains are too many, or have no weight"
        best, best_score = start, losses.score(start)
        for counts in placements(replica_counts, capacities[0], len(capacities), floor):
            score = losses.score(counts)
            # Sums of the same floats in another order differ in the last bits, which must not decide.
            if score > best_score + EPSILON:
                best, best_score = counts, score
        return best

    def _starts(
        self,
        replica_counts: Sequence[int],
        capacities: Sequence[int],
        floor: int,
        loads: Sequence[float] | None,
        start: Counts,
    ) -> list[Counts]:
        full = group_sizes(len(replica_counts), min(capacities))
        size, longer = divmod(len(replica_counts), len(full))
        even = [size + 1] * longer + [size] * (len(full) - longer)
        searched = len(capacities) <= MAX_SEARCHED_DOMAINS
        others = (full[::-1], even, even[::-1]) if searched else (even,)
        options = {tuple(sizes) for sizes in others} - {tuple(full)}
        built = [overlap_groups(replica_counts, capacities, sizes, loads) for sizes in sorted(options)]
        if not built:
            return [start]
        starts = [start, *(spread_to_floor(counts, floor) for counts in built)]
        # Scores are rounded, so that equal scores have the same order on every machine.
        return sorted(starts, key=lambda counts: -round(self._score([counts]), 12))

    def _improve(self, starts: Sequence[Counts], capacities: Sequence[int], floor: int, losses: Losses) -> Counts:
        weights = np.ones(len(starts[0]))
        # A separate generator: every rank searches by itself and has to find the same placement.
        draw = random.Random(self.seed)
        best = Search(starts[0], capacities, floor, losses, weights)
        best.descend()
        for number in range(1, len(starts) + self.num_kicks):
            start = starts[number] if number < len(starts) else best.result()
            search = Search(start, capacities, floor, losses, weights)
            if number >= len(starts):
                search.kick(draw, num_swaps=3)
            search.descend()
            best = search if search.score > best.score + EPSILON else best
        return best.result()

    def _joint(
        self,
        layers: Sequence[Counts],
        replica_counts: Sequence[Sequence[int]],
        capacities: Sequence[int],
        loads: Sequence[Sequence[float] | None],
        losses: Losses,
    ) -> list[Counts]:
        # Aligns layers for joint survival. Uses maximum rank overlap in all layers instead if this survives more often.
        turned = _align(layers, capacities, losses)
        plain = [
            spread_to_floor(overlap(counts, capacities, load), self._floor(counts))
            for counts, load in zip(replica_counts, loads, strict=True)
        ]
        if self._score(turned) >= self._score(plain) - EPSILON:
            return turned
        pairs = zip(plain, loads, strict=True)
        return [layer if load is None or not self.balance else _even_out(layer, load) for layer, load in pairs]

    def _losses(self, num_domains: int, limit: int | None = None) -> Losses | None:
        # Returns the losses with which exchanges are evaluated; None if there are too many losses of several domains.
        if num_domains > MAX_SEARCHED_DOMAINS:
            return None
        masks, values = self.objective.losses(num_domains, limit or self.num_losses)
        # Losses of single domains alone are not enough if the objective has larger losses.
        single_only = not (masks & (masks - 1)).any() and any(self.objective.weights(num_domains)[2:])
        return None if single_only or not len(masks) else Losses(masks=masks, values=values)

    def _score(self, layers: Iterable[Counts]) -> float:
        # Returns the joint survival under the objective, or under the losses of ``_losses`` if it cannot be counted.
        kept = list(layers)
        num_domains = kept[0].shape[1]
        masks = [_mask(held) for counts in kept for held in counts > 0]
        try:
            return self.objective.score(masks, num_domains)
        except TooManyStates:
            losses = self._losses(num_domains)
            if losses is None:
                raise
            stacked = np.concatenate(kept)
            return losses.score(stacked)


@lru_cache(maxsize=16)
def search_base(
    search: OverlapSearch, counts: tuple[tuple[int, ...], ...], capacities: tuple[int, ...]
) -> tuple[Counts, ...]:
    """Find domains for base copies. Results are cached, because all plans of a membership have the same base copies."""
    return tuple(search.assign_layers(counts, capacities, [None] * len(counts)))


def _cheaper(
    kept: tuple[tuple[int, ...], ...], fresh: tuple[tuple[int, ...], ...], loads: Sequence[float]
) -> tuple[tuple[int, ...], ...]:
    """Return ``fresh`` if its busiest rank has fewer tokens than that of ``kept`` by more than the fraction
    ``WORTH_MOVING``, otherwise ``kept``. Both are placements of one layer."""
    # Even shares never give the busiest rank fewer tokens than balanced shares, and they are cheaper to compute.
    if len(kept) <= MAX_BALANCED_RANKS:
        before, after = (busiest_tokens(copies_per_rank(slots, len(loads)), loads) for slots in (kept, fresh))
    else:
        before, after = (float(even_tokens(slots, loads).max()) for slots in (kept, fresh))
    return kept if before * (1 - WORTH_MOVING) <= after else fresh


def _mask(held: np.ndarray) -> int:
    return int.from_bytes(np.packbits(held, bitorder="little").tobytes(), "little")


def placements(replica_counts: Sequence[int], num_slots: int, num_domains: int, floor: int) -> Iterator[Counts]:
    """Yield the counts ``[E, D]`` of every placement with each expert in ``floor`` domains, or in as many as possible.

    All domains have ``num_slots`` slots. Of placements that differ only in the order of domains, only one is yielded.
    """
    num_experts = len(replica_counts)
    left = [*replica_counts, num_slots * num_domains - sum(replica_counts)]
    columns = list(combinations_with_replacement(range(num_experts + 1), num_slots))
    goals = np.minimum(np.minimum(replica_counts, floor), num_domains)
    for chosen in _fill(columns, 0, left, num_domains):
        counts = np.zeros((num_experts + 1, num_domains), dtype=np.int64)
        for domain, column in enumerate(chosen):
            np.add.at(counts[:, domain], list(column), 1)
        if ((counts[:-1] > 0).sum(axis=1) >= goals).all():
            yield counts[:-1]


def _fill(columns: list[Column], first: int, left: list[int], num_domains: int) -> Iterator[tuple[Column, ...]]:
    if not num_domains:
        yield ()
        return
    smallest = next(expert for expert, count in enumerate(left) if count)
    for position in range(first, len(columns)):
        column = columns[position]
        # Columns are in ascending order: no further column contains the smallest expert that still needs slots.
        if column[0] > smallest:
            return
        if any(column.count(expert) > left[expert] for expert in set(column)):
            continue
        rest = left.copy()
        for expert in column:
            rest[expert] -= 1
        for others in _fill(columns, position, rest, num_domains - 1):
            yield (column, *others)


def _align(layers: Sequence[Counts], capacities: Sequence[int], losses: Losses) -> list[Counts]:
    """Exchange domains of equal capacity in one layer after another, as long as the joint survival of layers grows.

    An exchange changes only the joint survival of layers, and not the survival of its layer alone.
    """
    result = [layer.copy() for layer in layers]
    lethal = [_lethal(layer, losses) for layer in result]
    pairs = [(a, b) for a, b in combinations(range(len(capacities)), 2) if capacities[a] == capacities[b]]
    cover = np.sum(lethal, axis=0, dtype=np.int32)
    for _ in range(MAX_SWEEPS):
        changed = False
        for position in range(len(result)):
            # Only losses that all other layers survive can change the joint survival.
            others = (cover - lethal[position]) == 0
            improved = _turn(result[position], others, pairs, losses)
            if improved is not None:
                cover = cover - lethal[position]
                result[position], lethal[position] = improved
                cover = cover + lethal[position]
                changed = True
        if not changed:
            break
    return result


def _lethal(counts: Counts, losses: Losses) -> Bools:
    return np.asarray(losses.dead(support_masks(counts)).any(axis=0))


def _turn(
    counts: Counts, others: Bools, pairs: Sequence[tuple[int, int]], losses: Losses
) -> tuple[Counts, Bools] | None:
    # Makes every exchange of two domains of a layer that improves joint survival; returns None if no exchange does.
    values = np.where(others, losses.values, 0.0)
    best, best_lethal = counts, _lethal(counts, losses)
    score, changed, quiet = float(values[~best_lethal].sum()), False, 0
    while quiet < len(pairs):
        for left, right in pairs:
            turned = best.copy()
            turned[:, [left, right]] = turned[:, [right, left]]
            lethal = _lethal(turned, losses)
            gain = float(values[~lethal].sum()) - score
            if gain > EPSILON:
                best, best_lethal, score, changed, quiet = turned, lethal, score + gain, True, 0
            else:
                quiet += 1
            if quiet >= len(pairs):
                break
    return (best, best_lethal) if changed else None


def _even_out(counts: Counts, loads: Sequence[float], max_exchanges: int = MAX_EXCHANGES) -> Counts:
    """Even out the loads of domains by exchanging the places of experts with equal numbers of replicas (whole rows of
    ``counts`` ``[E, D]``).

    Each step makes the exchange that lowers the sum of squared loads most. Two experts exchange all their
    domains, so the placement survives exactly as often as before, alone and jointly with other layers.
    """
    weights = per_replica_loads(counts, loads)
    totals = counts.sum(axis=1)
    left, right = np.nonzero(np.triu(totals[:, None] == totals[None, :], k=1))
    if not left.size:
        return counts
    held = counts.astype(np.float64)
    overlaps = held @ held.T
    distances = overlaps[left, left] + overlaps[right, right] - 2 * overlaps[left, right]
    domain_tokens = weights @ held
    along = held @ domain_tokens
    # Smaller gains may be rounding errors, with which the exchanges would never end.
    enough = -NEGLIGIBLE * float(domain_tokens.sum()) ** 2
    expert_of = np.arange(len(totals))  # expert of each row
    for _ in range(max_exchanges):
        standing = weights[expert_of]
        moved = standing[right] - standing[left]
        change = moved * (2 * (along[left] - along[right]) + moved * distances)
        best = int(change.argmin())
        if change[best] >= enough:
            break
        first, second = left[best], right[best]
        # An update is much faster than computing ``along`` again for each exchange with hundreds of experts.
        along += moved[best] * (overlaps[first] - overlaps[second])
        expert_of[[first, second]] = expert_of[[second, first]]
    result = np.empty_like(counts)
    result[expert_of] = counts
    return result

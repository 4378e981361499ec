"""Searches a placement of expert replicas. Base copies, by default equally many of each expert, are placed so that the
experts survive losses of domains at least as often as with maximum rank overlap. Extra copies are placed by load."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, combinations_with_replacement
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.algorithm import PlacementBase, spread_to_floor, swap
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
from megatron_ft.planning.placement.maximum_rank_overlap import group_sizes, overlap, overlap_groups
from megatron_ft.planning.placement.plan import Slots
from megatron_ft.planning.placement.survival import SurvivalObjective, TooManyStates

EPSILON = 1e-12

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Masks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Weighted sets of lost domains. A search maximizes the weight of the sets that a placement survives."""

    masks: Masks
    """Sets of lost domains, ``[M]``; bit d of an entry is set if domain d is lost."""
    values: Floats
    """Weight of each set, ``[M]``."""

    def dead(self, held: Masks) -> Bools:
        """Return for each expert and each loss whether all domains of the expert (mask ``held``) are lost."""
        wide = held[..., None]
        return np.asarray((self.masks & wide) == wide)

    def score(self, counts: Counts) -> float:
        """Return the total weight of the losses after which every expert in ``counts`` ``[E, D]`` has a replica."""
        return float(self.values[~self.dead(support_masks(counts)).any(axis=0)].sum())


def support_masks(counts: Counts) -> Masks:
    """Return the domains of each expert as bit masks, ``[E]``."""
    bits = np.int64(1) << np.arange(counts.shape[1], dtype=np.int64)
    return np.asarray((counts > 0) @ bits, dtype=np.int64)


class Search:
    """Improves one placement. It tries the pairs of domains in order and makes the best exchange of each pair, so that
    equal inputs give equal results.

    Empty slots count as replicas of one additional expert, which need not survive.
    """

    def __init__(self, counts: Counts, capacities: Sequence[int], floor: int, losses: Losses, weights: Floats) -> None:
        vacant = np.asarray(capacities, dtype=np.int64) - counts.sum(axis=0)
        self.counts: Counts = np.vstack((counts, vacant))
        self.losses = losses
        # Empty slots may be in any domain, so they need 0 domains, and no loss affects them.
        self.goals = np.append(np.minimum(np.minimum(counts.sum(axis=1), floor), counts.shape[1]), 0)
        self.weights = np.append(weights, 0.0)
        self._refresh()

    def _refresh(self) -> None:
        self.support = (self.counts > 0).sum(axis=1)
        self.masks = support_masks(self.counts)
        self.dead = self.losses.dead(self.masks)
        self.dead[-1] = False
        self.cover = self.dead.sum(axis=0, dtype=np.int16)
        self.score = float(self.losses.values[self.cover == 0].sum())
        self.sums = self.weights @ self.counts

    def result(self) -> Counts:
        """Return the number of replicas of each expert in each domain, ``[E, D]``."""
        return self.counts[:-1].copy()

    def descend(self) -> None:
        """Exchange replicas until no exchange improves survival."""
        self._repeat(self._improve)

    def even_out(self, least_score: float) -> None:
        """Exchange replicas to even out the loads of domains. The score (total weight of the losses that all experts
        survive) stays at least ``least_score``."""

        def evened(left: int, right: int) -> bool:
            ours, theirs, gains = self._gains(left, right)
            best = self._evener(ours, theirs, gains >= least_score - self.score - EPSILON, left, right)
            return best is not None and self._exchange(ours, theirs, best, left, right)

        self._repeat(evened)

    def _repeat(self, attempt: Callable[[int, int], bool]) -> None:
        pairs = list(combinations(range(self.counts.shape[1]), 2))
        quiet = 0
        while quiet < len(pairs):
            for pair in pairs:
                quiet = 0 if attempt(*pair) else quiet + 1
                if quiet >= len(pairs):
                    break

    def kick(self, draw: random.Random, num_swaps: int) -> None:
        """Try ``num_swaps`` random exchanges of replicas after which every expert is still in enough domains."""
        for _ in range(num_swaps):
            left, right = draw.sample(range(self.counts.shape[1]), 2)
            ours, theirs, allowed = self._exchanges(left, right)
            options = np.argwhere(allowed)
            if len(options):
                mine, other = options[draw.randrange(len(options))]
                swap(self.counts, int(ours[mine]), left, int(theirs[other]), right)
                self.support = (self.counts > 0).sum(axis=1)
        self._refresh()

    def _exchanges(self, left: int, right: int) -> tuple[Masks, Masks, Bools]:
        ours, theirs = np.nonzero(self.counts[:, left])[0], np.nonzero(self.counts[:, right])[0]
        allowed = self._keeps_floor(ours, left, right)[:, None] & self._keeps_floor(theirs, right, left)[None, :]
        return ours, theirs, allowed & (ours[:, None] != theirs[None, :])

    def _keeps_floor(self, experts: Masks, source: int, target: int) -> Bools:
        # Number of domains that the expert loses: 1 if it leaves ``source``, minus 1 if ``target`` is new to it.
        lost = (self.counts[experts, source] == 1).astype(np.int64) - (self.counts[experts, target] == 0)
        return np.asarray(self.support[experts] - lost >= self.goals[experts])

    def _moved(self, experts: Masks, source: int, target: int) -> npt.NDArray[np.int16]:
        """Return ``[experts, M]``: for each expert, how ``cover`` (number of experts without a replica after each of
        M losses) changes if only one replica of this expert moves from domain ``source`` to ``target``."""
        single = self.counts[experts, source] == 1
        after = np.where(single, self.masks[experts] & ~(1 << source), self.masks[experts]) | (1 << target)
        # The two experts of an exchange are different, so their changes add up.
        change = self.losses.dead(after).astype(np.int16) - self.dead[experts]
        change[experts == len(self.counts) - 1] = 0
        return change

    def _gains(self, left: int, right: int) -> tuple[Masks, Masks, Floats]:
        # Returns the experts in each of two domains, and the gain in score of each exchange; -inf if not allowed.
        ours, theirs, allowed = self._exchanges(left, right)
        change = self._moved(ours, left, right)[:, None] + self._moved(theirs, right, left)[None, :]
        gains = ((self.cover + change) == 0) @ self.losses.values - self.score
        return ours, theirs, np.where(allowed, gains, -np.inf)

    def _improve(self, left: int, right: int) -> bool:
        ours, theirs, gains = self._gains(left, right)
        if not gains.size or gains.max() <= EPSILON:
            return False
        return self._exchange(ours, theirs, int(gains.argmax()), left, right)

    def _exchange(self, ours: Masks, theirs: Masks, position: int, left: int, right: int) -> bool:
        mine, other = divmod(position, len(theirs))
        swap(self.counts, int(ours[mine]), left, int(theirs[other]), right)
        self._refresh()
        return True

    def _evener(self, ours: Masks, theirs: Masks, allowed: Bools, left: int, right: int) -> int | None:
        # Returns the flat index of the allowed exchange that lowers the sum of squared loads most; None if none does.
        if not allowed.any():
            return None
        moved = self.weights[ours][:, None] - self.weights[theirs][None, :]
        change = 2 * moved * (self.sums[right] - self.sums[left] + moved)
        change = np.where(allowed, change, 0.0)
        best = int(change.argmin())
        return best if change.flat[best] < -1e-9 * float(self.sums.sum()) ** 2 else None


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
    by load. At least ``min_replicas`` copies of every expert, and all copies without loads, are base copies."""

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
        """Return the base copies of each layer, ``[L][E, D]``. Return None if all copies are base copies: if the loads
        of a layer are missing, or ``base_copies`` returns None."""
        base = self.base_copies(replica_counts, sum(capacities), min_replicas)
        if base is None or any(load is None for load in loads):
            return None
        distinct = tuple(dict.fromkeys(base))
        places = search_base(self, distinct, base_capacities(capacities, sum(base[0])))
        found = dict(zip(distinct, places, strict=True))
        return [found[copies] for copies in base]

    def base_copies(
        self, replica_counts: Sequence[Sequence[int]], num_slots: int, min_replicas: int | None
    ) -> tuple[tuple[int, ...], ...] | None:
        """Return the number of base copies of each expert, ``[L][E]``, if each layer has ``num_slots`` slots. Return
        None if all copies are base copies: if ``survival_share`` is 1, or the counts leave no extra copies."""
        floor = min([*map(min, replica_counts), *([] if min_replicas is None else [min_replicas])])
        num_base = max(floor * len(replica_counts[0]), int(self.survival_share * num_slots))
        base = tuple(base_counts(counts, floor, num_base) for counts in replica_counts)
        are_all = base == tuple(map(tuple, replica_counts))
        return None if are_all or self.survival_share == 1 else base

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
    """Yield the replica counts ``[E, D]`` of each placement in which every expert is in ``floor`` domains, or in as
    many as possible. All domains have ``num_slots`` slots. Of placements that differ only in the order of domains, only
    one is yielded."""
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

"""Placement by search: survives at least as often as maximum rank overlap and keeps a minimum of distinct domains."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, combinations_with_replacement
from typing import ClassVar

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.algorithm import PlacementBase, domain_loads, spread_to_floor
from megatron_ft.planning.placement.frontier import TooManyStates
from megatron_ft.planning.placement.layout import Counts, per_replica_loads
from megatron_ft.planning.placement.local_search import EPSILON, Bools, Losses, Search, support_masks
from megatron_ft.planning.placement.maximum_rank_overlap import group_sizes, overlap, overlap_groups
from megatron_ft.planning.placement.objective import SurvivalObjective

MAX_SEARCHED_DOMAINS = 62
MAX_SWEEPS = 4
"""Number of sweeps of ``align`` over all layers."""
MAX_EXCHANGES = 100
NEGLIGIBLE = 1e-9
"""``even_out`` makes no exchange that lowers the squared total load by less than this share."""
Column = tuple[int, ...]
"""Experts in the slots of one domain, ascending; the number of experts represents an empty slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSearch(PlacementBase):
    """Improves maximum rank overlap and its variants under an objective.

    * Every expert is on ``min_domains`` distinct failure domains, or on as many as its replicas and the cluster allow.
    * If the slots of a domain divide the number of experts, or are at least as many, maximum rank overlap is optimal
      and kept. Otherwise small layers are solved by enumeration of all placements, medium ones by exchanges of
      replicas, large ones by the best of several groupings.
    * Domains of layers are then permuted for joint survival.
    """

    name: ClassVar[str] = "overlap_search"
    objective: SurvivalObjective = field(default_factory=SurvivalObjective)
    min_domains: int | None = None
    """Minimum number of distinct failure domains of an expert; None for the smallest replica count of the layer."""
    num_exhaustive_slots: int = 15
    """Largest number of slots of a layer that is solved by enumeration."""
    num_losses: int = 1024
    """Largest number of sets of lost domains that guide the exchanges, fewest domains first."""
    num_kicks: int = 4
    """Restarts from a perturbed best placement."""
    seed: int = 0
    balance: bool = True
    """Whether loads of domains are made even, if loads are given."""
    survival_budget: float = 0.0
    """Share of a layer's survival, under the objective, that may be given up for even loads. Above 0, rare experts
    overlap in smaller groups, which leaves slots beside them for popular ones; the placement may then survive less
    often than maximum rank overlap. The minimum number of domains is kept."""

    def assign_layers(
        self,
        replica_counts: Sequence[Sequence[int]],
        capacities: Sequence[int],
        loads: Sequence[Sequence[float] | None],
    ) -> list[Counts]:
        self.objective.validate(len(capacities))
        if not 0 <= self.survival_budget < 1:
            raise ConfigError.of("survival_budget", self.survival_budget, "must be at least 0 and below 1")
        losses = self._losses(len(capacities))
        layers = [
            self.assign(counts, capacities, load, losses) for counts, load in zip(replica_counts, loads, strict=True)
        ]
        # One layer has no other to be aligned with, and for very many domains there are no losses to guide the search.
        if losses is not None and len(layers) > 1:
            layers = self._joint(layers, replica_counts, capacities, loads, losses)
        return layers

    def assign(
        self,
        replica_counts: Sequence[int],
        capacities: Sequence[int],
        loads: Sequence[float] | None = None,
        losses: Losses | None = None,
    ) -> Counts:
        """Replicas per domain of one layer, ``[E, D]``."""
        floor = self._floor(replica_counts)
        found = self._search(replica_counts, capacities, floor, loads, losses)
        if loads is None or not self.balance:
            return found
        losses = losses or self._losses(len(capacities))
        options = [found]
        if self.survival_budget:
            options += self._looser(replica_counts, capacities, floor, loads, self._score([found]))
        evened = [self._even_out(counts, capacities, floor, loads, losses) for counts in options]
        return min(evened, key=lambda counts: float(domain_loads(counts, loads).max()))

    def _even_out(
        self, counts: Counts, capacities: Sequence[int], floor: int, loads: Sequence[float], losses: Losses | None
    ) -> Counts:
        evened = even_out(counts, loads)
        if losses is None:
            return evened
        search = Search(evened, capacities, floor, losses, per_replica_loads(evened, loads))
        search.even_out(search.score)
        polished = search.result()
        # The search is guided by some losses only, so its result may be worse under all of them.
        return polished if self._score([polished]) >= self._score([evened]) - EPSILON else evened

    def _looser(
        self,
        replica_counts: Sequence[int],
        capacities: Sequence[int],
        floor: int,
        loads: Sequence[float],
        best_score: float,
    ) -> list[Counts]:
        options = []
        for size in range(min(capacities) - 1, 0, -1):
            sizes = group_sizes(len(replica_counts), size)
            counts = spread_to_floor(overlap_groups(replica_counts, capacities, sizes, loads), floor)
            if self._score([counts]) < best_score * (1 - self.survival_budget):
                break
            options.append(counts)
        return options

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
        # The class promises never to survive less often than maximum rank overlap.
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
        # Best of all placements; ``start`` if none is better.
        # All sets of lost domains: enumeration of placements is exact only if their scores are.
        losses = self._losses(len(capacities), limit=1 << len(capacities))
        assert losses is not None, "too many losses for a small layer"
        best, best_score = start, losses.score(start)
        for counts in placements(replica_counts, capacities[0], len(capacities), floor):
            score = losses.score(counts)
            # Equal sums of floats in another order differ in the last bits: they must not replace the best placement.
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
        starts = [start, *(spread_to_floor(counts, floor) for counts in built)]
        # Rounded, so that equal scores keep their order on every machine.
        return sorted(starts, key=lambda counts: -round(self._score([counts]), 12))

    def _improve(self, starts: Sequence[Counts], capacities: Sequence[int], floor: int, losses: Losses) -> Counts:
        weights = np.ones(len(starts[0]))
        # A generator of its own: every rank searches by itself and has to find the same placement.
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
        # Align the layers for joint survival; use maximum rank overlap in all layers if that survives better.
        turned = align(layers, capacities, losses)
        plain = [
            spread_to_floor(overlap(counts, capacities, load), self._floor(counts))
            for counts, load in zip(replica_counts, loads, strict=True)
        ]
        if self.survival_budget or self._score(turned) >= self._score(plain) - EPSILON:
            return turned
        pairs = zip(plain, loads, strict=True)
        return [layer if load is None or not self.balance else even_out(layer, load) for layer, load in pairs]

    def _losses(self, num_domains: int, limit: int | None = None) -> Losses | None:
        # Losses that guide a search; None if there would be too many beyond single domains.
        if num_domains > MAX_SEARCHED_DOMAINS:
            return None
        masks, values = self.objective.losses(num_domains, limit or self.num_losses)
        # Losses of single domains alone cannot guide a search whose objective has larger ones.
        single_only = not (masks & (masks - 1)).any() and any(self.objective.weights(num_domains)[2:])
        return None if single_only or not len(masks) else Losses(masks=masks, values=values)

    def _score(self, layers: Iterable[Counts]) -> float:
        # Joint survival under the objective; under the guiding losses if it cannot be counted.
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


def _mask(held: np.ndarray) -> int:
    return int.from_bytes(np.packbits(held, bitorder="little").tobytes(), "little")


def placements(replica_counts: Sequence[int], num_slots: int, num_domains: int, floor: int) -> Iterator[Counts]:
    """Yield replicas per domain ``[E, D]`` of every placement that keeps each expert on ``floor`` domains if possible.

    Domains with ``num_slots`` each are interchangeable, so only one of all orders of the same columns is yielded.
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
        # Columns are ascending, and so is their order: from here on none has the smallest expert that is left.
        if column[0] > smallest:
            return
        if any(column.count(expert) > left[expert] for expert in set(column)):
            continue
        rest = left.copy()
        for expert in column:
            rest[expert] -= 1
        for others in _fill(columns, position, rest, num_domains - 1):
            yield (column, *others)


def align(layers: Sequence[Counts], capacities: Sequence[int], losses: Losses) -> list[Counts]:
    """Exchange domains of equal capacity, one layer at a time, as long as joint survival grows.

    An exchange does not change the survival of its own layer, but a model survives only if all its layers do.
    """
    result = [layer.copy() for layer in layers]
    lethal = [_lethal(layer, losses) for layer in result]
    pairs = [(a, b) for a, b in combinations(range(len(capacities)), 2) if capacities[a] == capacities[b]]
    cover = np.sum(lethal, axis=0, dtype=np.int32)
    for _ in range(MAX_SWEEPS):
        changed = False
        for position in range(len(result)):
            # Only losses that all other layers survive can be gained or lost by this one.
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
    # Exchange domains of a layer, each exchange as soon as it improves joint survival; None if none does.
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


def even_out(counts: Counts, loads: Sequence[float], max_exchanges: int = MAX_EXCHANGES) -> Counts:
    """Even out the loads of domains: exchange whole rows of ``counts`` ``[E, D]`` between experts with equal numbers of
    replicas.

    Each exchange is the one that lowers the sum of squared loads most. The sets of domains that hold some expert do not
    change, so the placement survives exactly as before, alone and jointly with other layers.
    """
    weights = per_replica_loads(counts, loads)
    totals = counts.sum(axis=1)
    left, right = np.nonzero(np.triu(totals[:, None] == totals[None, :], k=1))
    if not left.size:
        return counts
    held = counts.astype(np.float64)
    overlaps = held @ held.T
    distances = overlaps[left, left] + overlaps[right, right] - 2 * overlaps[left, right]
    along = held @ (weights @ held)
    # Gains of rounding errors would continue without end.
    enough = -NEGLIGIBLE * float((weights @ held).sum()) ** 2
    expert_of = np.arange(len(totals))  # expert of each row
    for _ in range(max_exchanges):
        standing = weights[expert_of]
        moved = standing[right] - standing[left]
        change = moved * (2 * (along[left] - along[right]) + moved * distances)
        best = int(change.argmin())
        if change[best] >= enough:
            break
        first, second = left[best], right[best]
        # Updated, not computed again: with hundreds of experts each exchange would cost as much as the first.
        along += moved[best] * (overlaps[first] - overlaps[second])
        expert_of[[first, second]] = expert_of[[second, first]]
    result = np.empty_like(counts)
    result[expert_of] = counts
    return result

"""Placement by search: keeps a floor of distinct failure domains and is never worse than maximum rank overlap."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement import exhaustive
from megatron_ft.planning.placement.algorithm import domain_loads, prepare, spread_to_floor
from megatron_ft.planning.placement.alignment import align
from megatron_ft.planning.placement.frontier import TooManyStates
from megatron_ft.planning.placement.layout import Counts, per_replica_loads
from megatron_ft.planning.placement.local_search import EPSILON, Losses, Search
from megatron_ft.planning.placement.maximum_rank_overlap import group_sizes, overlap, overlap_groups
from megatron_ft.planning.placement.objective import SurvivalObjective
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.relabel import even_out
from megatron_ft.topology import Cluster

MAX_SEARCHED_DOMAINS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSearch:
    """Starts from maximum rank overlap and its variants and improves them under an objective.

    * Every expert sits on ``min_domains`` distinct failure domains, or on as many as its replicas and the cluster
      allow.
    * Where the slots of a domain divide the number of experts, or are no fewer, the construction is best already and
      is kept. Elsewhere small layers are solved by trying every placement, medium ones by exchanging replicas, large
      ones by the best of several groupings.
    * Layers are then turned against each other for joint survival.
    """

    objective: SurvivalObjective = field(default_factory=SurvivalObjective)
    min_domains: int | None = None
    """Floor of distinct failure domains of every expert; None keeps the smallest replica count of the layer."""
    num_exhaustive_slots: int = 15
    """Layers with at most so many slots are solved exactly."""
    num_losses: int = 1024
    """Sets of lost domains that guide the exchanges: fewest domains first, whole numbers of domains only."""
    num_kicks: int = 4
    """Restarts from a disturbed best placement."""
    seed: int = 0
    balance: bool = True
    """Whether loads of domains are evened out, where loads are given, as far as ``survival_budget`` goes."""
    survival_budget: float = 0.0
    """Share of a layer's survival, as the objective weighs it, that evening out loads may cost. Above 0, rare experts
    overlap in smaller groups that leave room beside them for popular ones; the placement may then survive less than
    maximum rank overlap. The floor of domains is kept."""

    def place(
        self,
        replica_counts: Sequence[Sequence[int]],
        cluster: Cluster,
        *,
        num_slots_per_rank: int,
        ranks: Sequence[int] | None = None,
        loads: Sequence[Sequence[float]] | None = None,
        layer_numbers: Sequence[int] | None = None,
    ) -> PlacementPlan:
        """See ``PlacementAlgorithm.place``."""
        layout, layer_loads = prepare(replica_counts, cluster, num_slots_per_rank, ranks, loads)
        capacities = layout.capacities()
        self.objective.validate(len(capacities))
        if not 0 <= self.survival_budget < 1:
            raise ConfigError.of("survival_budget", self.survival_budget, "must be at least 0 and below 1")
        losses = self._losses(len(capacities))
        layers = [
            self.assign(counts, capacities, load, losses)
            for counts, load in zip(replica_counts, layer_loads, strict=True)
        ]
        if losses is not None and len(layers) > 1:
            layers = self._joint(layers, replica_counts, capacities, layer_loads, losses)
        slots = tuple(layout.deal(layer, load) for layer, load in zip(layers, layer_loads, strict=True))
        return PlacementPlan.of(layout, slots, len(replica_counts[0]), "overlap_search", layer_numbers)

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
        """The same survival with loads of domains as even as exchanges make them."""
        evened = even_out(counts, loads)
        if losses is None:
            return evened
        search = Search(evened, capacities, floor, losses, per_replica_loads(evened, loads))
        search.even_out(search.score)
        polished = search.result()
        return polished if self._score([polished]) >= self._score([evened]) - EPSILON else evened

    def _looser(
        self,
        replica_counts: Sequence[int],
        capacities: Sequence[int],
        floor: int,
        loads: Sequence[float],
        best_score: float,
    ) -> list[Counts]:
        """Overlaps in smaller groups, which leave room for popular experts beside rare ones, within the budget."""
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
        """The placement that survives best, loads aside."""
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
        """The best of all placements; ``start`` where none is better."""
        losses = self._losses(len(capacities), limit=1 << len(capacities))
        assert losses is not None, "a small layer has few losses"
        best, best_score = start, losses.score(start)
        for counts in exhaustive.placements(replica_counts, capacities[0], len(capacities), floor):
            score = losses.score(counts)
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
        """Placements by groups of other sizes, best first: the short group first, or all groups even."""
        full = group_sizes(len(replica_counts), min(capacities))
        size, longer = divmod(len(replica_counts), len(full))
        even = [size + 1] * longer + [size] * (len(full) - longer)
        searched = len(capacities) <= MAX_SEARCHED_DOMAINS
        others = (full[::-1], even, even[::-1]) if searched else (even,)
        options = {tuple(sizes) for sizes in others} - {tuple(full)}
        built = [overlap_groups(replica_counts, capacities, sizes, loads) for sizes in sorted(options)]
        starts = [start, *(spread_to_floor(counts, floor) for counts in built)]
        return sorted(starts, key=lambda counts: -round(self._score([counts]), 12))

    def _improve(self, starts: Sequence[Counts], capacities: Sequence[int], floor: int, losses: Losses) -> Counts:
        """The best that exchanges find from any start, then from disturbed bests."""
        weights = np.ones(len(starts[0]))
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
        """Layers turned for joint survival, or the construction's layers where those survive better together."""
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
        """The losses that guide a search; None where they would be too many, single domains aside."""
        if num_domains > MAX_SEARCHED_DOMAINS:
            return None
        masks, values = self.objective.losses(num_domains, limit or self.num_losses)
        single_only = not (masks & (masks - 1)).any() and any(self.objective.weights(num_domains)[2:])
        return None if single_only or not len(masks) else Losses(masks=masks, values=values)

    def _score(self, layers: Iterable[Counts]) -> float:
        """Joint survival under the whole objective; by the guiding losses where that cannot be counted."""
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

"""Local search: improves a placement by exchanging replicas between failure domains."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from megatron_ft.planning.placement.algorithm import swap
from megatron_ft.planning.placement.layout import Counts

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

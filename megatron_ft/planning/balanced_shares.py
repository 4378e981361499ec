"""Shares of the ranks that hold an expert, such that the fullest rank is least (``placement.shares=balanced``).

A flow in integers over the graph of experts and their holders. Legend: E experts, N ranks, P pairs of an expert and a
rank that holds it, ordered by expert, then rank. ``T[e, j]`` tokens of expert e on rank j; ``Q[e, j]`` tokens of e that
rank j computes; ``load[j] = sum_e Q[e, j]``. ``split(a, w)`` divides the amount a in proportion to the weights w: with
``c_i = w_0 + ... + w_i`` and their sum c, item i gets ``(a * c_i + c // 2) // c - (a * c_{i-1} + c // 2) // c``. Parts
add up to a, and where ``a <= c`` none exceeds its weight. The rule:

1. Start. A holder computes its own tokens, ``T[e, j]``; those of ranks that do not hold e are split evenly.
2. Limit. The mean load of the ranks that hold something, or the tokens of an expert over its holders, whichever is
   largest, rounded up: no shares have a smaller maximum.
3. Rounds, until no load is above the limit, at most ``MAX_ROUNDS`` of them:

   a. Levels. Ranks below the limit have level 0. For k = 0, 1, ...: experts without level and with a holder of level k
      get level k; ranks without level and with a share of an expert of level k get level k + 1. So tokens of a rank of
      level k reach a rank with room in k moves, and in no fewer.
   b. If a rank above the limit has no level, all ranks without level hold tokens of such experts only as have no other
      holders. Their mean load, rounded up, is the new limit: again, no shares have a smaller maximum. The round ends.
   c. Otherwise, for k from the highest level down to 1, tokens of experts of level k - 1 move from ranks of level k
      above the limit to ranks of level k - 1:

      * A giving rank wishes to give what is above the limit: first tokens that other ranks sent, split by
        ``max(0, Q - T)``, then its own, split by ``min(Q, T)``. ``want[e]`` are the wishes for e together.
      * If k is 1, a taking rank offers its room, at most what its experts want together, split by ``want``; the tokens
        of e that move are ``min(want[e], offers for e)``. If k is above 1, all of ``want[e]`` moves, and every offer
        counts as 1: these ranks pass tokens on to the next level.
      * What moves is taken from the givers split by their wishes, and given to the takers split by their offers.

Every sum is over a set and every split has a fixed order, so ranks, experts and pairs of one step may be visited in any
order or at once. Every round either raises the limit or moves tokens from ranks above it to ranks below. When the
rounds end early enough, the maximum is the limit: the bound of the linear program, rounded up.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

MAX_TOKENS = 2**31
"""Tokens of a layer and microbatch over all ranks must be fewer: products of two such numbers fit 64 bits."""
MAX_ROUNDS = 64
"""Bound of the time on chains of experts that pass tokens over many ranks; shares stay as they are after so many."""
RESOLUTION = 2**16
"""Tokens of the mean rank in ``least_load``."""
_NONE = -1


def balanced_quotas(tokens: Integers, replicas: Integers) -> Integers:
    """Return ``Q[E, N]``: tokens of each expert that each rank computes.

    Args:
        tokens: ``T[E, N]``, not negative, fewer than ``MAX_TOKENS`` together.
        replicas: copies of each expert on each rank ``[E, N]``; above 0 wherever an expert has tokens.
    """
    flow = _Flow(tokens, replicas)
    for _ in range(MAX_ROUNDS):
        if not (flow.load > flow.limit).any():
            break
        flow.find_levels()
        if not flow.raise_limit():
            for level in range(int(flow.rank_level.max()), 0, -1):
                flow.move_down(level)
    quota = np.zeros(tokens.shape, dtype=np.int64)
    quota[flow.expert, flow.rank] = flow.share
    return quota


def least_load(loads: Sequence[float], replicas: Integers) -> float:
    """Return the load of the fullest rank with balanced shares, from tokens of each expert ``[E]`` of any unit.

    It does not depend on the ranks that tokens are on. The load of each expert is rounded to less than
    ``2 / RESOLUTION`` of the mean rank's load; whole numbers below that resolution stay exact.

    Args:
        loads: not negative.
        replicas: copies of each expert on each rank ``[E, N]``; above 0 wherever an expert has tokens.
    """
    total = float(np.sum(loads))
    if not total:
        return 0.0
    # All tokens come from one more rank, which holds nothing.
    tokens = np.zeros((len(loads), replicas.shape[1] + 1), dtype=np.int64)
    # A power of two, so that whole numbers stay whole.
    scale = 2.0 ** math.floor(math.log2(min(RESOLUTION * replicas.shape[1], MAX_TOKENS // 2) / total))
    tokens[:, -1] = np.rint(np.asarray(loads, dtype=np.float64) * scale)
    quota = balanced_quotas(tokens, np.pad(replicas, ((0, 0), (0, 1))))
    return float(quota.sum(axis=0).max()) / scale


class _Groups:
    """Pairs by expert or by rank: sums over each group, and splits within it."""

    def __init__(self, group_of: Integers, num_groups: int) -> None:
        self._group_of, self._num_groups = group_of, num_groups
        self._order = np.argsort(group_of, kind="stable")
        self.sizes = self.sum(np.ones_like(group_of))

    def sum(self, values: npt.NDArray[Any]) -> Integers:
        """Sum ``values`` [P] over each group."""
        total = np.zeros(self._num_groups, dtype=np.int64)
        np.add.at(total, self._group_of, values)
        return total

    def split(self, amounts: Integers, weights: npt.NDArray[Any]) -> Integers:
        """Split the amount of each group by ``weights`` [P]; groups whose weights are 0 split nothing."""
        group, weight = self._group_of[self._order], weights[self._order]
        totals = self.sum(weights)
        end = np.cumsum(weight) - (np.cumsum(totals) - totals)[group]
        amount, total = amounts[group], np.maximum(totals, 1)[group]
        parts = (amount * end + total // 2) // total - (amount * (end - weight) + total // 2) // total
        result = np.empty(len(parts), dtype=np.int64)
        result[self._order] = parts
        return result


class _Flow:
    """Shares of all pairs, and the loads and levels that follow from them."""

    def __init__(self, tokens: Integers, replicas: Integers) -> None:
        self.expert, self.rank = (index.astype(np.int64) for index in np.nonzero(replicas))
        self._by_expert = _Groups(self.expert, tokens.shape[0])
        self._by_rank = _Groups(self.rank, tokens.shape[1])
        self._own = tokens[self.expert, self.rank]
        totals = tokens.sum(axis=1)
        elsewhere = totals - self._by_expert.sum(self._own)
        self.share = self._own + self._by_expert.split(elsewhere, np.ones_like(self._own))
        self.load = self._by_rank.sum(self.share)
        per_holder = _ceil(totals, np.maximum(self._by_expert.sizes, 1))
        mean = _ceil(totals.sum(), max(1, np.count_nonzero(self._by_rank.sizes)))
        self.limit = int(max(mean, per_holder.max(initial=0)))
        self.rank_level = np.zeros_like(self.load)
        self.expert_level = np.zeros_like(totals)

    def find_levels(self) -> None:
        """Set the levels of ranks and experts (rule 3a)."""
        self.rank_level = np.where(self.load < self.limit, 0, _NONE)
        self.expert_level = np.full_like(self.expert_level, _NONE)
        level = 0
        while (self.rank_level == level).any():
            near = self._by_expert.sum(self.rank_level[self.rank] == level) > 0
            self.expert_level[near & (self.expert_level == _NONE)] = level
            near = self._by_rank.sum((self.expert_level[self.expert] == level) & (self.share > 0)) > 0
            level += 1
            self.rank_level[near & (self.rank_level == _NONE)] = level

    def raise_limit(self) -> bool:
        """Raise the limit if a rank above it has no level (rule 3b); return whether it was raised."""
        group = self.load[self.rank_level == _NONE]
        if not (group > self.limit).any():
            return False
        self.limit = int(_ceil(group.sum(), len(group)))
        return True

    def move_down(self, level: int) -> None:
        """Move tokens from ranks of ``level`` above the limit to ranks of the level below (rule 3c)."""
        near = self.expert_level[self.expert] == level - 1
        wish = self._wishes(near & (self.rank_level[self.rank] == level))
        want = self._by_expert.sum(wish)
        takers = near & (self.rank_level[self.rank] == level - 1)
        if level == 1:
            wanted = np.where(takers, want[self.expert], 0)
            room = np.where(self.rank_level == 0, self.limit - self.load, 0)
            offer = self._by_rank.split(np.minimum(room, self._by_rank.sum(wanted)), wanted)
            moved = np.minimum(want, self._by_expert.sum(offer))
        else:
            offer, moved = takers.astype(np.int64), want
        self.share = self.share + self._by_expert.split(moved, offer) - self._by_expert.split(moved, wish)
        self.load = self._by_rank.sum(self.share)

    def _wishes(self, givers: npt.NDArray[np.bool_]) -> Integers:
        """Return what each pair of ``givers`` [P] wishes to give, [P]."""
        foreign = np.where(givers, np.maximum(self.share - self._own, 0), 0)
        own = np.where(givers, np.minimum(self.share, self._own), 0)
        above = np.maximum(self.load - self.limit, 0)
        first = np.minimum(above, self._by_rank.sum(foreign))
        then = np.minimum(above - first, self._by_rank.sum(own))
        return self._by_rank.split(first, foreign) + self._by_rank.split(then, own)


def _ceil(amount: Any, count: Any) -> Any:
    return -(-amount // count)

"""Balanced shares (``placement.shares=balanced``): the rank with most tokens gets as few tokens as possible.

A holder of an expert is a rank with a replica of it. The rule computes an integer flow between experts and their
holders. Legend: E experts, N ranks, P pairs of an expert and a holder, ordered by expert, then by rank. ``T[e, j]`` is
the number of tokens that rank j routes to expert e, and ``Q[e, j]`` the number of tokens of e that rank j computes;
``load[j] = sum_e Q[e, j]``. ``split(a, w)`` divides the amount a in proportion to the weights w: with
``c_i = w_0 + ... + w_i`` and their sum c, item i gets ``(a * c_i + c // 2) // c - (a * c_{i-1} + c // 2) // c``. The
sum of the parts is a, and if ``a <= c``, no part is larger than its weight. The shares are computed in three steps:

1. Start. A holder computes its own tokens, ``T[e, j]``. Tokens of e on ranks that do not hold e are split equally over
   the holders of e.
2. Limit. The limit of a rank's load is the larger of two numbers, rounded up: the mean load of the ranks that hold an
   expert, and the largest ratio of an expert's tokens to its number of holders. In every distribution, the largest load
   is at least this limit.
3. Rounds, at most ``MAX_ROUNDS``, until no load is above the limit:

   a. Levels. Ranks below the limit have level 0. For k = 0, 1, ...: an expert without a level gets level k if one of
      its holders has level k; a rank without a level gets level k + 1 if it has a share of an expert of level k. So a
      token on a rank of level k reaches a rank with room in k moves, and not in fewer.
   b. If a rank above the limit has no level, the round ends with a new limit: the mean load of all ranks without a
      level, rounded up. In every distribution, the largest load is at least this limit, because only these ranks hold
      the experts whose tokens they compute.
   c. Otherwise, for k from the highest level down to 1, tokens of experts of level k - 1 move from ranks of level k
      above the limit (giving ranks) to ranks of level k - 1 (taking ranks):

      * A giving rank wishes to give its load minus the limit. It first gives tokens from other ranks, split by
        ``max(0, Q - T)``, then its own tokens, split by ``min(Q, T)``. ``want[e]`` is the sum of the wishes for e.
      * If k is 1, the offer of a taking rank is its room (the limit minus its load), but at most the sum of ``want``
        over its experts; it is split by ``want``. ``min(want[e], sum of the offers for e)`` tokens of e move. If k is
        above 1, ``want[e]`` tokens move, and every offer is 1, because taking ranks pass the tokens on.
      * The tokens that move are taken from the giving ranks, split by their wishes, and given to the taking ranks,
        split by their offers.

Integer sums do not depend on the order of their terms, and every split has a fixed order. So the ranks, experts and
pairs of one step may be visited in any order or at once. Every round either raises the limit or moves tokens from ranks
above the limit to ranks below it. If no load is above the limit after at most ``MAX_ROUNDS`` rounds, the largest load
equals the limit. It is then the smallest possible: the optimum of the linear program with divisible tokens, rounded up.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

MAX_TOKENS = 2**31
"""Limit for the tokens of one layer and microbatch, on all ranks together. Below this limit, the product of two counts
fits in 64 bits."""
MAX_ROUNDS = 64
"""Largest number of rounds in which tokens move between ranks, to limit the computing time. The result of the last
round is used even if a load is above the limit."""
RESOLUTION = 2**16
"""``least_load`` scales loads so that the mean load of a rank is at most this number, then rounds them to integers."""
_NONE = -1


def balanced_quotas(tokens: Integers, replicas: Integers) -> Integers:
    """Return ``Q[E, N]``, the number of tokens of each expert that each rank computes.

    Args:
        tokens: ``T[E, N]``, not negative, with a sum below ``MAX_TOKENS``.
        replicas: number of copies of each expert on each rank, ``[E, N]``; an expert with tokens must have a copy.
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
    """Return the load of the busiest rank under balanced shares, in the unit of ``loads``.

    The result does not depend on the ranks from which tokens come. The load of each expert is rounded by less than
    ``2 / RESOLUTION`` of the mean load of a rank. Whole numbers are not rounded if the mean load of a rank is at most
    ``RESOLUTION`` and the sum of all loads at most ``MAX_TOKENS / 2``.

    Args:
        loads: load of each expert, ``[E]``, such as its number of tokens; not negative.
        replicas: copies of each expert on each rank ``[E, N]``; every expert with tokens has at least one copy.
    """
    total = float(np.sum(loads))
    if not total:
        return 0.0
    # All tokens come from an additional rank without replicas, so no rank with replicas has tokens of its own.
    tokens = np.zeros((len(loads), replicas.shape[1] + 1), dtype=np.int64)
    # A power of two, so that whole numbers stay whole.
    scale = 2.0 ** math.floor(math.log2(min(RESOLUTION * replicas.shape[1], MAX_TOKENS // 2) / total))
    tokens[:, -1] = np.rint(np.asarray(loads, dtype=np.float64) * scale)
    quota = balanced_quotas(tokens, np.pad(replicas, ((0, 0), (0, 1))))
    return float(quota.sum(axis=0).max()) / scale


class _Groups:
    """Groups of pairs (expert, rank with a copy). A group has all pairs of one expert, or all pairs of one rank."""

    def __init__(self, group_of: Integers, num_groups: int) -> None:
        self._group_of, self._num_groups = group_of, num_groups
        self._order = np.argsort(group_of, kind="stable")
        self.sizes = self.sum(np.ones_like(group_of))

    def sum(self, values: npt.NDArray[Any]) -> Integers:
        """Return, for each group of pairs, the sum of their ``values`` [P]."""
        total = np.zeros(self._num_groups, dtype=np.int64)
        np.add.at(total, self._group_of, values)
        return total

    def split(self, amounts: Integers, weights: npt.NDArray[Any]) -> Integers:
        """Divide each group's amount among its pairs in proportion to ``weights`` [P]. Pairs of weight 0 get none."""
        group, weight = self._group_of[self._order], weights[self._order]
        totals = self.sum(weights)
        end = np.cumsum(weight) - (np.cumsum(totals) - totals)[group]
        amount, total = amounts[group], np.maximum(totals, 1)[group]
        parts = (amount * end + total // 2) // total - (amount * (end - weight) + total // 2) // total
        result = np.empty(len(parts), dtype=np.int64)
        result[self._order] = parts
        return result


class _Flow:
    """Tokens of each expert that each rank computes; loads of ranks; levels (module docstring) of ranks and experts."""

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
        """Compute the levels of ranks and experts (step 3a of the module docstring)."""
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
        """Raise the load limit if necessary (step 3b of the module docstring). Return whether the limit was raised."""
        group = self.load[self.rank_level == _NONE]
        if not (group > self.limit).any():
            return False
        self.limit = int(_ceil(group.sum(), len(group)))
        return True

    def move_down(self, level: int) -> None:
        """Move tokens from overloaded ranks of ``level`` to ranks one level below (step 3c of the module docstring)."""
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
        """Return, for each pair (expert, rank), the number of the expert's tokens that the rank, which has too many,
        should give to other ranks, ``[P]`` (step 3c of the module docstring); 0 for pairs with ``givers`` false."""
        foreign = np.where(givers, np.maximum(self.share - self._own, 0), 0)
        own = np.where(givers, np.minimum(self.share, self._own), 0)
        above = np.maximum(self.load - self.limit, 0)
        first = np.minimum(above, self._by_rank.sum(foreign))
        then = np.minimum(above - first, self._by_rank.sum(own))
        return self._by_rank.split(first, foreign) + self._by_rank.split(then, own)


def _ceil(amount: Any, count: Any) -> Any:
    return -(-amount // count)

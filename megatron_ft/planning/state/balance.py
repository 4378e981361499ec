"""Distributes bytes over the ranks that can send them, so that the busiest sender sends as little as possible.

A *set* consists of ranks that hold the same elements; its *demand* is the number of bytes that these ranks together
must send. Let ``t`` be ``Shares.slack``. If a rank sends bytes of a set, no other rank of this set sends more than
``t`` bytes less in total. Let ``b`` be the bytes of the busiest sender in the best assignment. It follows that the
busiest of ``m`` senders sends at most ``b + (m - 1) * t`` bytes, and also at most
``(1 + e) * b + t * log(m) / log(1 + e)`` bytes for every ``e > 0``. This also holds with sets of only one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.planning.state.tensors import Column

RELATIVE_SLACK = 0.01
"""Difference between two ranks of a set, as a fraction of the busiest sender's bytes, that is accepted: to reduce it
further is not worth another pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """Bytes that each rank sends for each set."""

    senders: tuple[Column, ...]
    """Sending ranks of each set, ascending."""
    amounts: tuple[Column, ...]
    """Bytes that each of these ranks sends, all above 0; their sum is the demand of the set."""
    slack: int
    """Bytes by which the total of a set's sender may exceed the total of another rank of the set."""

    @classmethod
    def of(cls, demands: Sequence[int], sets: Sequence[Column], *, min_piece_bytes: int) -> "Shares":
        """Distribute the demand of each set over its ranks.

        At most ``demand // min_piece_bytes`` ranks of a set send, but at least one, because many small pieces cost more
        than a busier sender. Sets with one rank are assigned first. Every other demand is then spread over the least
        busy ranks of its set. Demands are spread again as long as the totals of a set differ by more than the slack and
        this lowers the sum of the squared totals. Every pass lowers this integer, so the passes end.

        Args:
            demands: bytes that each set must send.
            sets: ranks of each set, ascending; a set may consist of ``STORAGE`` alone.
        """
        highest = max((int(ranks[-1]) for ranks in sets if len(ranks)), default=0)
        loads = [0] * (highest + 2)  # index -1 is storage
        chosen: list[list[int]] = [[] for _ in sets]
        amounts: list[list[int]] = [[] for _ in sets]
        open_sets = []
        for number, (demand, ranks) in enumerate(zip(demands, sets, strict=True)):
            if not demand:
                continue
            if len(ranks) == 1:
                chosen[number], amounts[number] = ranks.tolist(), [demand]
                loads[chosen[number][0]] += demand
            else:
                open_sets.append(number)
        members = {number: sets[number].tolist() for number in open_sets}
        order = sorted(open_sets, key=lambda number: (len(members[number]), -demands[number], number))
        for number in order:
            chosen[number], amounts[number] = _spread(demands[number], members[number], loads, min_piece_bytes)
            _add(loads, chosen[number], amounts[number], 1)
        while True:
            slack = max(2 * min_piece_bytes + 1, int(RELATIVE_SLACK * max(loads[:-1], default=0)))
            has_changed = False
            for number in order:
                busiest = max(loads[rank] for rank in chosen[number])
                if busiest - min(loads[rank] for rank in members[number]) <= slack:
                    continue
                before = sum(loads[rank] ** 2 for rank in members[number])
                _add(loads, chosen[number], amounts[number], -1)
                again = _spread(demands[number], members[number], loads, min_piece_bytes)
                _add(loads, *again, 1)
                # Only a decrease counts: otherwise the same bytes could move back and forth without end.
                if sum(loads[rank] ** 2 for rank in members[number]) < before:
                    chosen[number], amounts[number] = again
                    has_changed = True
                else:
                    _add(loads, *again, -1)
                    _add(loads, chosen[number], amounts[number], 1)
            if not has_changed:
                break
        return cls(
            senders=tuple(np.array(ranks, dtype=np.int64) for ranks in chosen),
            amounts=tuple(np.array(of_set, dtype=np.int64) for of_set in amounts),
            slack=slack,
        )


def _add(loads: list[int], ranks: Sequence[int], amounts: Sequence[int], sign: int) -> None:
    for rank, amount in zip(ranks, amounts, strict=True):
        loads[rank] += sign * amount


def _spread(
    demand: int, ranks: Sequence[int], loads: Sequence[int], min_piece_bytes: int
) -> tuple[list[int], list[int]]:
    # Raises the least busy ranks to one level. Returns the sending ranks, ascending, and their bytes, all above 0.
    most = max(1, demand // max(1, min_piece_bytes))
    # Shares are whole bytes, and ties are resolved by rank number, so that every rank computes the same shares.
    by_load = sorted(ranks, key=lambda rank: (loads[rank], rank))[:most]
    total, count = demand, 0
    for rank in by_load:
        if count and loads[rank] * count >= total:
            break
        total += loads[rank]
        count += 1
    level, rest = divmod(total, count)
    found = [(rank, level + (place < rest) - loads[rank]) for place, rank in enumerate(by_load[:count])]
    found = sorted((rank, amount) for rank, amount in found if amount)
    return [rank for rank, _ in found], [amount for _, amount in found]

"""Shares the sending of bytes among the ranks that hold them, so that the busiest sender has as little as possible.

The bound: let ``t`` be ``Shares.slack``. No rank sends bytes of a set while another rank of that set sends more than
``t`` bytes less in total. It follows that, compared with the busiest sender of the best assignment, the busiest of
``m`` senders sends at most ``(m - 1) * t`` bytes more. For every ``e > 0`` it also sends at most a factor ``1 + e`` and
``t * log(m) / log(1 + e)`` bytes more. Ranks that alone hold something are included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.planning.state.tensors import Column

RELATIVE_SLACK = 0.01
"""Largest difference between senders of a set, as a share of the busiest sender's bytes; a smaller one is not worth a
further pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """Bytes that each rank sends for each set."""

    senders: tuple[Column, ...]
    """Sending ranks of each set, ascending."""
    amounts: tuple[Column, ...]
    """Bytes of these ranks, all above 0; they add up to the demand."""
    slack: int
    """Bytes by which two senders of a set may differ."""


def share(demands: Sequence[int], sets: Sequence[Column], *, min_piece_bytes: int) -> Shares:
    """Share each set's demand among its ranks.

    A set's demand is sent by at most ``demand // min_piece_bytes`` of its ranks, but at least by one: many small pieces
    cost more than a busier sender. Sets with one rank come first. Then every demand is spread over its least busy
    ranks, repeatedly, as long as two senders of a set differ by more than the slack and spreading lowers the sum of
    squares. Every pass lowers this integer, so the passes end.

    Args:
        demands: bytes to be sent for each set.
        sets: ranks, ascending; a set may consist of the pseudo rank of storage.
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
            # Only a true decrease counts: moving the same bytes back and forth would never end.
            if sum(loads[rank] ** 2 for rank in members[number]) < before:
                chosen[number], amounts[number] = again
                has_changed = True
            else:
                _add(loads, *again, -1)
                _add(loads, chosen[number], amounts[number], 1)
        if not has_changed:
            break
    return Shares(
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
    # Fill up the least busy ranks to one level; ranks ascending with their bytes, all above 0.
    most = max(1, demand // max(1, min_piece_bytes))
    # In whole bytes, ties by rank: every rank computes the same shares.
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

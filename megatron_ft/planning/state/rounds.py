"""Assigns transfers to rounds: in one round, no rank sends and receives together more than a limit of bytes.

Bound of the number of rounds: every piece has at most a quarter of the limit and is put into the first round in which
its sender and its receiver both have space for it. A round lacks space for a piece only if one of these two ranks has
used more than three quarters of the limit. Let ``a >= b`` be the two largest totals of bytes that a rank sends and
receives. Then there are at most ``1 + (a + b) / (3/4 limit)`` rounds. No schedule has fewer than ``a / limit`` rounds.
"""

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.holdings import STORAGE
from megatron_ft.planning.state.intervals import Rows, expand
from megatron_ft.planning.state.tensors import Column

PIECES_PER_LIMIT = 4


def cut_and_stage(
    source: Column, target: Column, num_items: Column, item_bytes: Column, limit_bytes: int
) -> tuple[Rows, Column, Column, Column]:
    """Cut transfers into pieces and assign a round to every piece, in the order of the transfers.

    Args:
        source: sending rank of each transfer; bytes from ``STORAGE`` count only for the target.
        limit_bytes: most bytes that a rank may send and receive together in one round.

    Returns:
        Four columns with one entry for each piece: the number of its transfer, the first item and the end of the items
        (exclusive) that the piece has of this transfer, and the round.

    Raises:
        ConfigError: ``limit_bytes`` is less than four times the largest of ``item_bytes``.
    """
    largest = int(item_bytes.max()) if len(item_bytes) else 0
    if limit_bytes < PIECES_PER_LIMIT * largest:
        raise ConfigError.of(
            "limit_bytes",
            limit_bytes,
            f"must be at least {PIECES_PER_LIMIT * largest}, {PIECES_PER_LIMIT} times the largest item",
        )
    most = limit_bytes // PIECES_PER_LIMIT // np.maximum(item_bytes, 1)
    rows, places = expand(-(-num_items // np.maximum(most, 1)))
    starts = places * most[rows]
    stops = np.minimum(starts + most[rows], num_items[rows])
    sizes = (stops - starts) * item_bytes[rows]
    return rows, starts, stops, _first_fit(source[rows], target[rows], sizes, limit_bytes)


def _first_fit(source: Column, target: Column, sizes: Column, limit_bytes: int) -> Column:
    num_ranks = int(max(source.max(), target.max())) + 1 if len(sizes) else 0
    # This is the common case, and the loop below is the slowest part of planning.
    if _all_at_once(source, target, sizes, num_ranks) <= limit_bytes:
        return np.zeros(len(sizes), dtype=np.int64)
    used: list[list[int]] = [[0] for _ in range(num_ranks)]
    # All rounds before a rank's first open one are too full for any piece, so the search need not begin at round 0.
    first_open = [0] * num_ranks
    is_open_below = limit_bytes - limit_bytes // PIECES_PER_LIMIT
    rounds = []
    for sender, receiver, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        here = used[receiver]
        # The plan does not limit the bytes that are read from storage in one round.
        there = here if sender == STORAGE else used[sender]
        turn = first_open[receiver]
        if there is not here and first_open[sender] > turn:
            turn = first_open[sender]
        room = limit_bytes - size
        while (turn < len(here) and here[turn] > room) or (turn < len(there) and there[turn] > room):
            turn += 1
        rounds.append(turn)
        for rank, of_rank in ((receiver, here),) if there is here else ((receiver, here), (sender, there)):
            if turn >= len(of_rank):
                of_rank.extend([0] * (turn + 1 - len(of_rank)))
            of_rank[turn] += size
            while first_open[rank] < len(of_rank) and of_rank[first_open[rank]] > is_open_below:
                first_open[rank] += 1
    return np.array(rounds, dtype=np.int64)


def _all_at_once(source: Column, target: Column, sizes: Column, num_ranks: int) -> int:
    totals: npt.NDArray[np.int64] = np.zeros(num_ranks, dtype=np.int64)
    is_sent = source != STORAGE
    np.add.at(totals, source[is_sent], sizes[is_sent])
    np.add.at(totals, target, sizes)
    return int(totals.max(initial=0))

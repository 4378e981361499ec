"""Transfers in rounds: in one round no rank sends and receives more than a limit of bytes.

The bound: pieces are at most a quarter of the limit, and each is put into the first round in which both of its ranks
have space. A round has no space for a piece only if one of the two ranks has used more than three quarters. So with
``a`` and ``b`` as the most bytes that two ranks send and receive in total, there are at most ``1 + (a + b) / (3/4
limit)`` rounds. No schedule has fewer than ``a / limit``.
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
    """Cut transfers into pieces and give each a round, in the order of the transfers.

    Args:
        source: sending rank of each transfer; transfers from storage count only for their target.
        limit_bytes: most bytes that a rank may send and receive, together, in one round.

    Returns:
        The transfer of each piece, the first and the last item (exclusive) in it, and the round.

    Raises:
        ConfigError: a limit below four items.
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
    # The common case, and the loop below is the slowest part of a plan.
    if _all_at_once(source, target, sizes, num_ranks) <= limit_bytes:
        return np.zeros(len(sizes), dtype=np.int64)
    used: list[list[int]] = [[0] for _ in range(num_ranks)]
    # Rounds below it are too full for any piece: without it the search would begin at round 0 for each piece.
    first_open = [0] * num_ranks
    is_open_below = limit_bytes - limit_bytes // PIECES_PER_LIMIT
    rounds = []
    for sender, receiver, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        here = used[receiver]
        # Storage serves all ranks at once, as far as this plan is concerned.
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

"""``TransferPlan``: which ranges of tensor elements ranks send to the ranks that need them in the next layout.

The same planner serves the migration of experts, joining ranks, new shards of the distributed optimizer, state copies,
snapshot windows and dense checkpoints: only the holdings and needs differ. Every rank computes the same plan, because
the plan depends only on holdings and needs, and not on the order of their rows.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.declined import Declined, MissingState
from megatron_ft.planning.state.holdings import STORAGE, Holdings, Medium, Needs
from megatron_ft.planning.state.intervals import Rows, distinct, expand, union
from megatron_ft.planning.state.sources import Matched, Pieces
from megatron_ft.planning.state.tensors import Column, StateTensor, TensorIndex

# A *set* consists of ranks that hold the same elements; its *demand* is the number of bytes that these ranks together
# must send. Let ``t`` be ``_Shares.slack``. A rank that sends bytes of a set sends in total at most ``t`` bytes more
# than any other rank of this set. Let ``b`` be the bytes of the busiest sender in the best assignment. Then the busiest
# of ``m`` senders sends at most ``b + (m - 1) * t`` bytes, and also at most ``(1 + e) * b + t * log(m) / log(1 + e)``
# bytes for every ``e > 0``. Both bounds also hold with sets of only one rank.

RELATIVE_SLACK = 0.01
"""Accepted difference between the bytes that two ranks of a set send, as a fraction of the busiest sender's bytes. The
bytes are not distributed again because of a smaller difference."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shares:
    """Bytes that each rank sends, for each set of possible senders of the same elements."""

    senders: tuple[Column, ...]
    """Sending ranks of each set, ascending."""
    amounts: tuple[Column, ...]
    """Bytes that each sending rank sends, all above 0; their sum is the number of bytes that the set must send."""
    slack: int
    """Largest number of bytes by which a sender's total may exceed the total of another rank of its set."""

    @classmethod
    def of(cls, demands: Sequence[int], sets: Sequence[Column], *, min_piece_bytes: int) -> "_Shares":
        """Distribute the bytes that each set of possible senders must send (its demand) over the ranks of the set.

        At most ``demand // min_piece_bytes`` ranks of a set send, but at least one, because many small pieces cost more
        than a busier sender. Sets with one rank are assigned first. Every other demand is then spread over the least
        busy ranks of its set. Passes over these demands follow. A pass spreads a demand again if the totals of its
        ranks differ by more than ``slack``, and keeps the result if it lowers the sum of the squared totals. The passes
        end when one of them changes nothing. They do end, because the sum is an integer that each change lowers.

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
    # Gives the least busy ranks equal totals. Returns the sending ranks, ascending, and their bytes, all above 0.
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


# Bound of the number of rounds: every piece has at most a quarter of the limit and is put into the first round in which
# its sender and its receiver both have space for it. A round lacks space for a piece only if one of these two ranks has
# used more than three quarters of the limit. Let ``a >= b`` be the two largest totals of bytes that a rank sends and
# receives. Then there are at most ``1 + (a + b) / (3/4 limit)`` rounds. No schedule has fewer than ``a / limit``
# rounds.

PIECES_PER_LIMIT = 4


def _cut_and_stage(
    source: Column, target: Column, num_items: Column, item_bytes: Column, limit_bytes: int
) -> tuple[Rows, Column, Column, Column]:
    """Cut transfers into pieces of whole items (elements). Assign a round to each piece, in the order of the transfers.

    Args:
        source: sending rank of each transfer; bytes from ``STORAGE`` count only for the target.
        limit_bytes: largest number of bytes that a rank may send and receive together in one round.

    Returns:
        Four columns with one entry for each piece: the index of its transfer; the start and the stop (exclusive) of its
        items within this transfer; its round.

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
    # Usually one round is enough, and the loop below is the slowest part of planning.
    if _all_at_once(source, target, sizes, num_ranks) <= limit_bytes:
        return np.zeros(len(sizes), dtype=np.int64)
    used: list[list[int]] = [[0] for _ in range(num_ranks)]
    # All rounds of a rank before its first open round are too full for any piece, so the search skips them.
    first_open = [0] * num_ranks
    is_open_below = limit_bytes - limit_bytes // PIECES_PER_LIMIT
    rounds = []
    for sender, receiver, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        here = used[receiver]
        # Bytes from storage count only for the receiver.
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


MIN_PIECE_BYTES = 1 << 20
"""Smallest number of bytes for which an additional sender is used; a smaller message is not worth its cost."""
STAGING_BYTES = 256 << 20
"""Default limit of the bytes that a rank sends and receives together in one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Elements [start, stop) of one tensor that ``source`` sends to ``target`` in one round."""

    round: int
    source: int
    """Sending rank; ``STORAGE`` if ``target`` reads the elements from storage."""
    target: int
    tensor: StateTensor
    start: int
    stop: int
    iteration: int
    medium: Medium
    """Kind of place that contains the elements, e.g. live state or a copy."""

    @property
    def num_bytes(self) -> int:
        """Size of the elements in bytes."""
        return (self.stop - self.start) * self.tensor.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Elements [start, stop) of one tensor that a rank needs and already has, so that no transfer is necessary."""

    rank: int
    tensor: StateTensor
    start: int
    stop: int
    iteration: int
    medium: Medium


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """Source of every needed element: either the rank already has it (``kept``), or exactly one transfer sends it.

    The columns from ``round`` to ``medium`` have one entry for each transfer, sorted by round, then by iteration and
    tensor. ``start`` and ``stop`` are element numbers within the tensor.
    """

    index: TensorIndex
    round: Column
    source: Column
    target: Column
    tensor: Column
    start: Column
    stop: Column
    iteration: Column
    medium: Column
    kept: Pieces
    """Needed ranges that ranks already have; ``start`` and ``stop`` are positions in ``index``."""
    limit_bytes: int
    """Largest number of bytes that a rank sends and receives together in one round."""
    slack_bytes: int
    """Bound of the imbalance: the sender of an element sends in total at most this many bytes more than any other
    possible sender of the element; see ``_Shares``."""

    def __len__(self) -> int:
        return len(self.round)

    @property
    def num_rounds(self) -> int:
        """Number of rounds; a rank begins a round after it has completed the previous round."""
        return int(self.round.max(initial=-1)) + 1

    @property
    def sizes(self) -> Column:
        """Bytes of each transfer."""
        return (self.stop - self.start) * self.index.item_bytes[self.tensor]

    @property
    def num_bytes(self) -> int:
        """Total bytes of all transfers."""
        return int(self.sizes.sum())

    @property
    def kept_bytes(self) -> int:
        """Total bytes of the needed elements that ranks already have."""
        kept = self.kept
        return int(((kept.stop - kept.start) * self.index.item_bytes[self.index.tensor_at(kept.start)]).sum())

    def sent_bytes(self) -> dict[int, int]:
        """Return the bytes that each rank sends; the key ``STORAGE`` has the bytes that are read from storage."""
        return _sums(self.source, self.sizes)

    def received_bytes(self) -> dict[int, int]:
        """Return the bytes that each rank receives."""
        return _sums(self.target, self.sizes)

    def transfers(self, rank: int | None = None) -> Iterator[Transfer]:
        """Yield the transfers in order: all of them, or only the transfers that ``rank`` sends or receives."""
        rows = slice(None) if rank is None else np.flatnonzero((self.source == rank) | (self.target == rank))
        columns = (
            self.round,
            self.source,
            self.target,
            self.tensor,
            self.start,
            self.stop,
            self.iteration,
            self.medium,
        )
        for turn, source, target, tensor, start, stop, iteration, medium in zip(
            *(column[rows].tolist() for column in columns), strict=True
        ):
            yield Transfer(
                round=turn,
                source=source,
                target=target,
                tensor=self.index.tensors[tensor],
                start=start,
                stop=stop,
                iteration=iteration,
                medium=Medium(medium),
            )

    def kept_by(self, rank: int) -> Iterator[Kept]:
        """Yield the needed ranges that ``rank`` already has, in order of tensor and element."""
        rows = np.flatnonzero(self.kept.rank == rank)
        rows = rows[np.argsort(self.kept.start[rows], kind="stable")]
        tensors = self.index.tensor_at(self.kept.start[rows])
        base = self.index.starts[tensors]
        columns = (tensors, self.kept.start[rows] - base, self.kept.stop[rows] - base)
        more = (self.kept.iteration[rows], self.kept.medium[rows])
        for tensor, start, stop, iteration, medium in zip(*(c.tolist() for c in (*columns, *more)), strict=True):
            found = self.index.tensors[tensor]
            yield Kept(rank=rank, tensor=found, start=start, stop=stop, iteration=iteration, medium=Medium(medium))

    def validate(self) -> None:
        """Assert that rounds ascend, and that no rank exceeds ``limit_bytes`` in a round or sends to itself."""
        assert bool((np.diff(self.round) >= 0).all()), "rounds do not ascend"
        assert not bool((self.source == self.target).any()), "a rank sends to itself"
        for turn in range(self.num_rounds):
            rows = self.round == turn
            used = _sums(self.target[rows], self.sizes[rows])
            for rank, num_bytes in _sums(self.source[rows], self.sizes[rows]).items():
                used[rank] = used.get(rank, 0) + (num_bytes if rank != STORAGE else 0)
            assert max(used.values()) <= self.limit_bytes, f"a rank exceeds {self.limit_bytes} bytes in round {turn}"

    def summary(self) -> str:
        """Describe the plan in one line for a log."""
        sent = max((size for rank, size in self.sent_bytes().items() if rank != STORAGE), default=0)
        received = max(self.received_bytes().values(), default=0)
        return (
            f"{self.num_bytes:,} bytes move in {len(self)} transfers and {self.num_rounds} rounds, at most {sent:,} "
            f"from one rank and {received:,} to one rank; {self.kept_bytes:,} needed bytes are already in place"
        )

    def digest(self) -> str:
        """Return a hash of all transfers and kept ranges. It is equal if two plans are equal."""
        found = hashlib.blake2b(digest_size=16)
        kept = self.kept
        order = np.lexsort((kept.start, kept.rank))
        for column in (self.round, self.source, self.target, self.tensor, self.start, self.stop, self.iteration):
            found.update(np.ascontiguousarray(column).tobytes())
        for column in (kept.rank, kept.start, kept.stop, kept.iteration, kept.medium):
            found.update(np.ascontiguousarray(column[order]).tobytes())
        return found.hexdigest()

    @classmethod
    def of(
        cls,
        holdings: Holdings,
        needs: Needs,
        *,
        limit_bytes: int = STAGING_BYTES,
        min_piece_bytes: int = MIN_PIECE_BYTES,
    ) -> "TransferPlan | Declined":
        """Plan the transfers that give every rank its needed elements. Return ``Declined`` if some needed elements are
        on no rank.

        Elements that a rank already has are not moved. Any other needed element comes from the fastest medium that
        contains it, and from the holders with the fewest bytes to send. The planning time grows with the numbers of
        rows and transfers, not with the number of pairs of ranks.

        Args:
            holdings: elements that living ranks and storage hold; rows of iterations without ``needs`` are ignored.
            needs: elements that ranks must have, with the same rank numbers as ``holdings``.
            limit_bytes: largest number of bytes that a rank may send and receive together in one round; this bounds its
                staging memory.
            min_piece_bytes: smallest number of bytes for which an additional sender is used.

        Raises:
            ConfigError: a row is outside its tensor, or ``limit_bytes`` is less than four times the largest element.
        """
        holdings.validate()
        needs.validate()
        matched = Matched.of(needs, holdings)
        # A plan must be complete: without some elements, a rank would not have the state of any iteration.
        if len(matched.missing.rank):
            return Declined(reason="no living rank holds these elements", missing=_missing(matched.missing, holdings))
        index = needs.index
        source, pieces, slack = _send(index, matched, min_piece_bytes)
        tensor = index.tensor_at(pieces.start)
        # Sorted by position: rounds follow layers, so the memory of a layer is free after the layer's last round.
        order = np.lexsort((source, pieces.rank, pieces.start, pieces.iteration))
        source, target, tensor = source[order], pieces.rank[order], tensor[order]
        start, stop = pieces.start[order] - index.starts[tensor], pieces.stop[order] - index.starts[tensor]
        rows, first, last, rounds = _cut_and_stage(source, target, stop - start, index.item_bytes[tensor], limit_bytes)
        # A stable sort: within a round, sender and receiver process their pieces in the same order.
        by_round = np.argsort(rounds, kind="stable")
        rows = rows[by_round]
        return cls(
            index=index,
            round=rounds[by_round],
            source=source[rows],
            target=target[rows],
            tensor=tensor[rows],
            start=start[rows] + first[by_round],
            stop=start[rows] + last[by_round],
            iteration=pieces.iteration[order][rows],
            medium=pieces.medium[order][rows],
            kept=matched.kept,
            limit_bytes=limit_bytes,
            slack_bytes=slack,
        )


def _send(index: TensorIndex, matched: Matched, min_piece_bytes: int) -> tuple[Column, Pieces, int]:
    # Returns the sender of each remote piece, the pieces (cut where the sender changes), and the slack of the shares.
    pieces = matched.remote
    order = np.lexsort((pieces.start, pieces.rank, pieces.iteration, pieces.senders))
    rank, start, stop, senders = (c[order] for c in (pieces.rank, pieces.start, pieces.stop, pieces.senders))
    iteration, medium = pieces.iteration[order], pieces.medium[order]
    item = index.item_bytes[index.tensor_at(start)]
    sizes = (stop - start) * item
    demands = np.zeros(len(matched.sets), dtype=np.int64)
    np.add.at(demands, senders, sizes)
    # Shares balance all media and iterations together, because a rank has one network connection for all of them.
    shares = _Shares.of(demands.tolist(), matched.sets, min_piece_bytes=min_piece_bytes)
    ends = np.cumsum(sizes)  # demands of all sets end to end; each sender sends one run of bytes of its set
    begins = ends - sizes
    nothing = [np.zeros(0, dtype=np.int64)]
    run_source = np.concatenate(nothing + list(shares.senders))
    run_ends = np.cumsum(np.concatenate(nothing + list(shares.amounts)))
    run_begins = np.concatenate([np.zeros(1, dtype=np.int64), run_ends])
    first = np.searchsorted(run_ends, begins, side="right")
    last = np.searchsorted(run_begins[:-1], ends, side="left")
    rows, places = expand(last - first)
    runs = first[rows] + places
    # If a run ends inside an element, the next run sends the whole element.
    low = np.maximum(run_begins[runs] - begins[rows], 0) // item[rows]
    high = np.where(run_ends[runs] >= ends[rows], sizes[rows], run_ends[runs] - begins[rows]) // item[rows]
    kept = low < high
    rows = rows[kept]
    cut = Pieces(
        rank=rank[rows],
        start=start[rows] + low[kept],
        stop=start[rows] + high[kept],
        iteration=iteration[rows],
        medium=medium[rows],
        senders=senders[rows],
    )
    return run_source[runs[kept]], cut, shares.slack


def _missing(missing: Pieces, holdings: Holdings) -> tuple[MissingState, ...]:
    index = holdings.index
    found = []
    for iteration in distinct(missing.iteration).tolist():
        rows = missing.iteration == iteration
        starts, stops = union(missing.start[rows], missing.stop[rows])
        is_joined = np.concatenate([[False], starts[1:] == stops[:-1]]) if len(starts) else np.zeros(0, dtype=bool)
        tensors = index.tensor_at(starts)
        # Touching ranges may belong to different tensors, because positions have no gap between adjacent tensors.
        is_joined[1:] &= tensors[1:] == tensors[:-1]
        begin = np.flatnonzero(~is_joined)
        end = np.append(begin[1:], len(starts)) - 1
        for tensor, start, stop in zip(tensors[begin].tolist(), starts[begin], stops[end], strict=True):
            base = int(index.starts[tensor])
            others = distinct(holdings.iteration[holdings.tensor == tensor]).tolist()
            found.append(
                MissingState(
                    tensor=index.tensors[tensor],
                    start=int(start) - base,
                    stop=int(stop) - base,
                    iteration=iteration,
                    held_iterations=tuple(other for other in others if other != iteration),
                )
            )
    return tuple(found)


def _sums(ranks: Column, sizes: Column) -> dict[int, int]:
    found, places = np.unique(ranks, return_inverse=True)
    totals = np.zeros(len(found), dtype=np.int64)
    np.add.at(totals, places, sizes)
    return dict(zip(found.tolist(), totals.tolist(), strict=True))

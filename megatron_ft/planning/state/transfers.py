"""``TransferPlan``: moves element ranges from ranks that have them to ranks that need them in the next layout.

One plan covers experts that migrate, ranks that join, a distributed optimizer that is cut again, state copies, windows
and dense checkpoints: only holdings and needs differ. It is a function of both, the same on every rank whatever the
order of their rows.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_ft.planning.state.balance import share
from megatron_ft.planning.state.declined import Declined, MissingState
from megatron_ft.planning.state.holdings import STORAGE, Holdings, Medium, Needs
from megatron_ft.planning.state.intervals import distinct, expand, union
from megatron_ft.planning.state.rounds import cut_and_stage
from megatron_ft.planning.state.sources import Matched, Pieces, match
from megatron_ft.planning.state.tensors import Column, StateTensor, TensorIndex

MIN_PIECE_BYTES = 1 << 20
"""Bytes below which it costs more in messages than it saves to spread a demand over more senders."""
STAGING_BYTES = 256 << 20
"""Bytes in flight per rank and round, unless another limit is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Elements [start, stop) of one tensor that are sent to a rank."""

    round: int
    source: int
    """Sending rank; ``STORAGE`` if the target reads them itself."""
    target: int
    tensor: StateTensor
    start: int
    stop: int
    iteration: int
    medium: Medium
    """Place of the elements on the source."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return (self.stop - self.start) * self.tensor.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Elements [start, stop) of one tensor that a rank needs and has itself; they cross no network."""

    rank: int
    tensor: StateTensor
    start: int
    stop: int
    iteration: int
    medium: Medium


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """Every needed element once: kept by its rank, or brought by one transfer.

    Transfers are columns in order of round, tensor, element and target; ``start`` and ``stop`` count inside the tensor.
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
    """Ranges that ranks keep; ``start`` and ``stop`` are positions of the index."""
    limit_bytes: int
    """Most bytes that a rank sends and receives in one round."""
    slack_bytes: int
    """Largest difference in sent bytes of two ranks that hold the same; see ``balance``."""

    def __len__(self) -> int:
        return len(self.round)

    @property
    def num_rounds(self) -> int:
        """Number of rounds; a rank begins a round after the one before is complete."""
        return int(self.round.max(initial=-1)) + 1

    @property
    def sizes(self) -> Column:
        """Bytes of each transfer."""
        return (self.stop - self.start) * self.index.item_bytes[self.tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all transfers."""
        return int(self.sizes.sum())

    @property
    def kept_bytes(self) -> int:
        """Bytes that ranks have already, over all ranks."""
        kept = self.kept
        return int(((kept.stop - kept.start) * self.index.item_bytes[self.index.tensor_at(kept.start)]).sum())

    def sent_bytes(self) -> dict[int, int]:
        """Return bytes by sending rank; bytes read from storage are under ``STORAGE``."""
        return _sums(self.source, self.sizes)

    def received_bytes(self) -> dict[int, int]:
        """Return bytes by receiving rank."""
        return _sums(self.target, self.sizes)

    def transfers(self, rank: int | None = None) -> Iterator[Transfer]:
        """Yield transfers in order: all, or those that ``rank`` sends or receives."""
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
        """List the ranges that a rank has itself, in order of tensor and element."""
        rows = np.flatnonzero(self.kept.rank == rank)
        rows = rows[np.argsort(self.kept.start[rows], kind="stable")]
        tensors = self.index.tensor_at(self.kept.start[rows])
        base = self.index.starts[tensors]
        columns = (tensors, self.kept.start[rows] - base, self.kept.stop[rows] - base)
        more = (self.kept.iteration[rows], self.kept.medium[rows])
        for tensor, start, stop, iteration, medium in zip(*(c.tolist() for c in (*columns, *more)), strict=True):
            found = self.index.tensors[tensor]
            yield Kept(rank=rank, tensor=found, start=start, stop=stop, iteration=iteration, medium=Medium(medium))

    def last_rounds(self, rank: int) -> dict[StateTensor, int]:
        """Return the round after which ``rank`` sends no more of a tensor, so that elements it does not need can be
        freed."""
        rows = np.flatnonzero(self.source == rank)
        pairs = zip(self.tensor[rows].tolist(), self.round[rows].tolist(), strict=True)
        return {self.index.tensors[tensor]: turn for tensor, turn in pairs}  # rounds rise: the last one stays

    def validate(self) -> None:
        """Assert that rounds keep the limit and ascend, and that no rank sends to itself."""
        assert bool((np.diff(self.round) >= 0).all()), "rounds rise"
        assert not bool((self.source == self.target).any()), "a rank sends to itself"
        for turn in range(self.num_rounds):
            rows = self.round == turn
            used = _sums(self.target[rows], self.sizes[rows])
            for rank, num_bytes in _sums(self.source[rows], self.sizes[rows]).items():
                used[rank] = used.get(rank, 0) + (num_bytes if rank != STORAGE else 0)
            assert max(used.values()) <= self.limit_bytes, f"round {turn} exceeds {self.limit_bytes} bytes"

    def summary(self) -> str:
        """Return one line for a log."""
        sent = max((size for rank, size in self.sent_bytes().items() if rank != STORAGE), default=0)
        received = max(self.received_bytes().values(), default=0)
        return (
            f"{self.num_bytes:,} bytes move in {len(self)} transfers and {self.num_rounds} rounds, at most {sent:,} "
            f"from one rank and {received:,} to one; {self.kept_bytes:,} bytes stay where they are"
        )

    def digest(self) -> str:
        """Return a hash of moved and kept elements, which ranks compare before they begin."""
        # Ranks that disagree about one transfer would wait for each other until a timeout: they compare this first.
        found = hashlib.blake2b(digest_size=16)
        kept = self.kept
        order = np.lexsort((kept.start, kept.rank))
        for column in (self.round, self.source, self.target, self.tensor, self.start, self.stop, self.iteration):
            found.update(np.ascontiguousarray(column).tobytes())
        for column in (kept.rank, kept.start, kept.stop, kept.iteration, kept.medium):
            found.update(np.ascontiguousarray(column[order]).tobytes())
        return found.hexdigest()


def plan_transfers(
    holdings: Holdings,
    needs: Needs,
    *,
    limit_bytes: int = STAGING_BYTES,
    min_piece_bytes: int = MIN_PIECE_BYTES,
) -> TransferPlan | Declined:
    """Plan how every need is met from holdings, or list what no rank holds.

    A rank keeps what it has. Any other element comes from the fastest medium that has it, and among its holders from
    those that send least. The number of steps grows with rows and transfers, never with pairs of ranks.

    Args:
        holdings: what living ranks and storage hold, of any iteration; only needed iterations count.
        needs: what ranks must have, with the same numbers of ranks.
        limit_bytes: most bytes that a rank may send and receive in one round, which is its staging memory.
        min_piece_bytes: a demand is spread over at most one sender for this many bytes of it.

    Raises:
        ConfigError: rows outside of their tensors, or a limit below four elements.
    """
    holdings.validate()
    needs.validate()
    matched = match(needs, holdings)
    # All or nothing: a plan that leaves elements out would give ranks state of no iteration.
    if len(matched.missing.rank):
        return Declined(reason="no living rank holds", missing=_missing(matched.missing, holdings))
    index = needs.index
    source, pieces, slack = _send(index, matched, min_piece_bytes)
    tensor = index.tensor_at(pieces.start)
    # By position, so that rounds follow layers and the memory of a layer is free after its last round.
    order = np.lexsort((source, pieces.rank, pieces.start, pieces.iteration))
    source, target, tensor = source[order], pieces.rank[order], tensor[order]
    start, stop = pieces.start[order] - index.starts[tensor], pieces.stop[order] - index.starts[tensor]
    rows, first, last, rounds = cut_and_stage(source, target, stop - start, index.item_bytes[tensor], limit_bytes)
    # Stable: within a round sender and receiver go through their pieces in the same order.
    by_round = np.argsort(rounds, kind="stable")
    rows = rows[by_round]
    return TransferPlan(
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
    # A sender for each remote piece, cut where the sender changes; and the balance's slack.
    pieces = matched.remote
    order = np.lexsort((pieces.start, pieces.rank, pieces.iteration, pieces.senders))
    rank, start, stop, senders = (c[order] for c in (pieces.rank, pieces.start, pieces.stop, pieces.senders))
    iteration, medium = pieces.iteration[order], pieces.medium[order]
    item = index.item_bytes[index.tensor_at(start)]
    sizes = (stop - start) * item
    demands = np.zeros(len(matched.sets), dtype=np.int64)
    np.add.at(demands, senders, sizes)
    # Over all media and iterations at once: a rank has one network connection for all of them.
    shares = share(demands.tolist(), matched.sets, min_piece_bytes=min_piece_bytes)
    ends = np.cumsum(sizes)  # all demands end to end, set after set: each sender has one run of it
    begins = ends - sizes
    nothing = [np.zeros(0, dtype=np.int64)]
    run_source = np.concatenate(nothing + list(shares.senders))
    run_ends = np.cumsum(np.concatenate(nothing + list(shares.amounts)))
    run_begins = np.concatenate([np.zeros(1, dtype=np.int64), run_ends])
    first = np.searchsorted(run_ends, begins, side="right")
    last = np.searchsorted(run_begins[:-1], ends, side="left")
    rows, places = expand(last - first)
    runs = first[rows] + places
    # A run that ends inside an element leaves all of it to the next one.
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
        # Tensors follow each other without a gap on the line of positions: touching ranges may be of different ones.
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

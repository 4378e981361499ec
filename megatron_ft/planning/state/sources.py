"""Finds the ranks that can send each element that a rank needs and does not have.

Let ``n`` be the number of rows, and ``d`` the largest number of different ranges that contain the same element. ``d``
is usually small (the whole tensor, an old and a new shard, state copies). The search takes O(n d log n) steps. All
ranks that hold the same range form one set, so the cost does not grow with the number of pairs of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.holdings import Holdings, Medium, Needs
from megatron_ft.planning.state.intervals import distinct, expand, split, union
from megatron_ft.planning.state.tensors import Column, TensorIndex

ENOUGH_SENDERS = 64
"""A set of possible senders of an element gets no further ranks if it has more ranks than this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Needed ranges of elements as columns; ``start`` and ``stop`` are positions in the ``TensorIndex``."""

    rank: Column
    """Rank that needs the elements."""
    start: Column
    stop: Column
    iteration: Column
    medium: Column
    """Kind of memory or storage (``Medium``) that contains the elements; -1 if none does."""
    senders: Column
    """Index in ``Matched.sets`` of the possible senders; -1 if the rank itself has the elements or no rank has them."""

    @classmethod
    def of(cls, rank: Column, start: Column, stop: Column, iteration: int, medium: int, senders: Column) -> "Pieces":
        """Create pieces that all have the same iteration and medium."""
        same = np.full(len(rank), iteration, dtype=np.int64), np.full(len(rank), medium, dtype=np.int64)
        return cls(rank=rank, start=start, stop=stop, iteration=same[0], medium=same[1], senders=senders)

    @classmethod
    def concatenate(cls, parts: "list[Pieces]") -> "Pieces":
        """Concatenate the columns of ``parts``."""
        names = ("rank", "start", "stop", "iteration", "medium", "senders")
        empty = [np.zeros(0, dtype=np.int64)]
        return cls(**{name: np.concatenate(empty + [getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matched:
    """Needed elements: ``kept`` are on the rank that needs them, ``remote`` are on other ranks or storage, and
    ``missing`` are nowhere."""

    kept: Pieces
    remote: Pieces
    missing: Pieces
    sets: tuple[Column, ...]
    """Sets of possible senders, to which ``Pieces.senders`` refers; ranks are ascending."""

    @classmethod
    def of(cls, needs: Needs, holdings: Holdings) -> "Matched":
        """Find the needed elements that each rank has, and the ranks that can send the needed elements that it lacks.

        Only holdings of the needed iteration are used. A rank's own holdings in memory are used before holdings of
        other ranks. Among holdings of other ranks and of storage, those on the fastest medium are used.
        """
        # A position has a meaning only in its ``TensorIndex``: in another index, it may be another element.
        index = needs.index
        assert index is holdings.index, "``needs`` and ``holdings`` must have the same tensor index"
        highest = max((int(rows.rank.max()) for rows in (needs, holdings) if len(rows)), default=0)
        if (highest + 1) * max(1, index.num_positions) > np.iinfo(np.int64).max:
            raise ConfigError.of(
                "number of elements", index.num_positions, f"must be below 2**63 / {highest + 1} (the number of ranks)"
            )
        sets = _Sets()
        kept: list[Pieces] = []
        remote: list[Pieces] = []
        missing: list[Pieces] = []
        for iteration in distinct(needs.iteration).tolist():
            wanted = needs.iteration == iteration
            sound = holdings.take(holdings.iteration == iteration)
            left = _lines(index, needs.rank[wanted], needs.tensor[wanted], needs.start[wanted], needs.stop[wanted])
            left = union(*left)
            by_medium = {medium: sound.take(sound.medium == int(medium)) for medium in Medium}
            for medium, own in by_medium.items():
                # Reading from storage counts as a transfer, so that the limit of bytes for each round applies to it.
                if medium is Medium.STORAGE or not len(own):
                    continue
                cover = union(*_lines(index, own.rank, own.tensor, own.start, own.stop))
                inside, outside = split(*left, *cover)
                kept.append(_pieces(index, inside[1], inside[2], iteration, medium))
                left = outside[1:]
            # The fastest medium comes first; elements that it does not contain are searched in the next medium.
            for others in by_medium.values():
                found, left = _match_others(index, left, others, iteration, sets)
                remote += found
            missing.append(_pieces(index, *left, iteration, -1))
        return cls(
            kept=Pieces.concatenate(kept),
            remote=Pieces.concatenate(remote),
            missing=Pieces.concatenate(missing),
            sets=tuple(sets.ranks),
        )


_Line = tuple[Column, Column]
"""Starts and stops of ranges of elements on ranks. Position p on rank r has the number ``r * num_positions + p``."""


def _lines(index: TensorIndex, rank: Column, tensor: Column, start: Column, stop: Column) -> _Line:
    base = rank * index.num_positions + index.starts[tensor]
    return base + start, base + stop


def _pieces(index: TensorIndex, starts: Column, stops: Column, iteration: int, medium: int) -> Pieces:
    rank = starts // max(1, index.num_positions)
    base = rank * index.num_positions
    nobody = np.full(len(rank), -1, dtype=np.int64)
    return Pieces.of(rank, starts - base, stops - base, iteration, medium, nobody)


class _Sets:
    """Distinct sets of ranks, numbered from 0."""

    def __init__(self) -> None:
        self.ranks: list[Column] = []
        self._numbers: dict[bytes, int] = {}
        self._unions: dict[tuple[int, ...], int] = {}

    def number(self, ranks: Column) -> int:
        """Return the index of the set of ``ranks``, which are ascending and distinct; add the set if it is new."""
        found = self._numbers.setdefault(ranks.tobytes(), len(self.ranks))
        if found == len(self.ranks):
            self.ranks.append(ranks)
        return found

    def union(self, numbers: tuple[int, ...]) -> int:
        """Return the index of the union of the sets ``numbers``. If the largest set has more than ``ENOUGH_SENDERS``
        ranks, return the index of this set instead."""
        largest = max(numbers, key=lambda number: len(self.ranks[number]))
        if len(numbers) == 1 or len(self.ranks[largest]) > ENOUGH_SENDERS:
            return largest
        if numbers not in self._unions:
            self._unions[numbers] = self.number(np.unique(np.concatenate([self.ranks[n] for n in numbers])))
        return self._unions[numbers]


def _match_others(
    index: TensorIndex, left: _Line, held: Holdings, iteration: int, sets: _Sets
) -> tuple[list[Pieces], _Line]:
    """Search ``held`` for ranks that can send the ranges ``left``. All rows of ``held`` have the same medium.

    Return the pieces found in ``held``, each with the set of ranks that can send it, and the ranges not found there.
    """
    wanted = _pieces(index, *left, iteration, -1)
    # After most changes few tensors move, so holdings of all other tensors are left out before sorting.
    is_wanted = np.zeros(len(index), dtype=np.bool_)
    is_wanted[index.tensor_at(wanted.start)] = True
    held = held.take(is_wanted[held.tensor])
    if not len(held) or not len(wanted.rank):
        return [], left
    edges, senders = _segments(index, held, sets)
    first = np.searchsorted(edges, wanted.start, side="right") - 1
    last = np.searchsorted(edges, wanted.stop, side="left")
    rows, places = expand(last - first)
    segments = first[rows] + places
    # Segment -1 is before the first edge, and the last segment is after the last edge: no rank holds their elements.
    bounds = np.concatenate([edges, np.array([index.num_positions, 0])])
    starts = np.maximum(wanted.start[rows], bounds[segments])
    stops = np.minimum(wanted.stop[rows], bounds[:-1][segments + 1])
    of_segment = np.concatenate([senders, np.array([-1, -1])])[segments]
    ranks, found = wanted.rank[rows], of_segment >= 0
    base = ranks[~found] * index.num_positions
    pieces = Pieces.of(
        ranks[found], starts[found], stops[found], iteration, int(held.medium[0]), of_segment[found].astype(np.int64)
    )
    return [pieces], (base + starts[~found], base + stops[~found])


def _segments(index: TensorIndex, held: Holdings, sets: _Sets) -> tuple[Column, Column]:
    # Returns the edges at which the set of holders may change, and the number of the set from each edge to the next,
    # which is -1 if no rank holds these elements.
    starts, stops = index.starts[held.tensor] + held.start, index.starts[held.tensor] + held.stop
    order = np.lexsort((held.rank, stops, starts))
    starts, stops, ranks = starts[order], stops[order], held.rank[order]
    is_first = np.ones(len(starts), dtype=np.bool_)
    is_first[1:] = (starts[1:] != starts[:-1]) | (stops[1:] != stops[:-1])
    # A rank that has two rows for the same range must not count as two senders.
    is_new = is_first.copy()
    is_new[1:] |= ranks[1:] != ranks[:-1]
    starts, stops, ranks, is_first = starts[is_new], stops[is_new], ranks[is_new], is_first[is_new]
    numbers = _numbers(ranks, np.append(np.flatnonzero(is_first), len(ranks)).astype(np.int64), sets)
    starts, stops = starts[is_first], stops[is_first]
    edges = distinct(np.concatenate([starts, stops]))
    first, last = np.searchsorted(edges, starts), np.searchsorted(edges, stops)
    rows, places = expand(last - first)
    segments = first[rows] + places
    by_segment = np.argsort(segments, kind="stable")
    segments, of_range = segments[by_segment], numbers[rows[by_segment]]
    counts = np.bincount(segments, minlength=len(edges))
    senders = np.full(len(edges), -1, dtype=np.int64)
    is_alone = counts[segments] == 1
    senders[segments[is_alone]] = of_range[is_alone]
    for segment, chosen in _groups(segments[~is_alone], of_range[~is_alone]):
        senders[segment] = sets.union(chosen)
    return edges, senders


def _numbers(ranks: Column, bounds: Column, sets: _Sets) -> Column:
    sizes = np.diff(bounds)
    numbers = np.zeros(len(sizes), dtype=np.int64)
    is_single = sizes == 1
    of_single = ranks[bounds[:-1][is_single]]
    # Most ranges have one holder. The sets of these holders are numbered without a loop over rows.
    known = distinct(of_single)
    single = np.array([sets.number(known[place : place + 1]) for place in range(len(known))], dtype=np.int64)
    numbers[is_single] = single[np.searchsorted(known, of_single)]
    for place in np.flatnonzero(~is_single).tolist():
        numbers[place] = sets.number(ranks[bounds[place] : bounds[place + 1]])
    return numbers


def _groups(segments: Column, numbers: Column) -> Iterator[tuple[int, tuple[int, ...]]]:
    ends = (np.flatnonzero(np.diff(segments, append=-1)) + 1).tolist()
    places, values = segments.tolist(), numbers.tolist()
    begin = 0
    for end in ends:
        yield places[begin], tuple(sorted(set(values[begin:end])))
        begin = end


assert int(Medium.STORAGE) == max(Medium), "storage, the slowest medium, must have the largest number"

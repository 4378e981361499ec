"""``Holdings``: the tensor elements that each rank has. ``Needs``: the tensor elements that each rank must have.

Both are stored as columns, because a job with thousands of ranks has about a million rows. ``Holding`` and ``Need``
are single rows.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.tensors import Column, StateTensor, TensorIndex

STORAGE = -1
"""Rank number that stands for storage. Every rank can read storage without the help of another rank."""


class Medium(IntEnum):
    """Kinds of places that can contain tensor elements (in memory or on storage), fastest first."""

    LIVE = 0
    """Weights and optimizer state with which the rank trains."""
    STATE_COPY = 1
    """Copy of an optimizer shard that the rank stores for an owner in another failure domain."""
    OWN_WINDOW = 2
    """Snapshot window of the rank, in the memory of its own node."""
    PEER_WINDOW = 3
    """Copy of another node's snapshot window, in the memory of the rank's node; the rank can send it."""
    STORAGE = 4
    """Snapshot window or dense checkpoint on storage, with correct hashes; the rank number is ``STORAGE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Elements [start, stop) of one tensor that a rank must have, with their values after ``iteration``.

    Holdings and needs use the same rank numbers. Every living process has a rank number, including spares and leaving
    ranks.
    """

    rank: int
    tensor: StateTensor
    start: int
    stop: int
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Elements [start, stop) of one tensor that a rank has, with their values after ``iteration``."""

    rank: int
    domain: str
    """Failure domain of the rank."""
    tensor: StateTensor
    start: int
    stop: int
    iteration: int
    medium: Medium = Medium.LIVE


@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """Needs of all ranks as columns of equal length, with one row for each ``Need``. Rows of one rank may overlap."""

    index: TensorIndex
    rank: Column
    tensor: Column
    """Index of the tensor in ``index.tensors``."""
    start: Column
    stop: Column
    iteration: Column

    @classmethod
    def of(cls, index: TensorIndex, rows: Iterable[Need]) -> "Needs":
        """Build the columns from ``rows``."""
        numbers = index.number_of
        table = [(row.rank, numbers[row.tensor.key], row.start, row.stop, row.iteration) for row in rows]
        return cls(index=index, **_columns(("rank", "tensor", "start", "stop", "iteration"), table))

    @classmethod
    def concatenate(cls, index: TensorIndex, parts: Sequence[Mapping[str, Column]]) -> "Needs":
        """Concatenate the columns of ``parts``; each part has a column for every field except ``index``."""
        names = ("rank", "tensor", "start", "stop", "iteration")
        if not parts:
            return cls.of(index, ())
        return cls(index=index, **{name: np.concatenate([part[name] for part in parts]) for name in names})

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Need]:
        columns = (self.rank, self.tensor, self.start, self.stop, self.iteration)
        for rank, tensor, start, stop, iteration in zip(*(c.tolist() for c in columns), strict=True):
            found = self.index.tensors[tensor]
            yield Need(rank=rank, tensor=found, start=start, stop=stop, iteration=iteration)

    @property
    def num_bytes(self) -> int:
        """Total bytes of all rows."""
        return int(((self.stop - self.start) * self.index.item_bytes[self.tensor]).sum())

    def validate(self) -> None:
        """Check that the elements of every row are inside their tensor and that the row's rank is at least 0.

        Raises:
            ConfigError: elements are outside of their tensor or a rank is negative; the message names the row.
        """
        _check_rows(self, lowest_rank=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Holdings:
    """Holdings of all ranks as columns of equal length, with one row for each ``Holding``."""

    index: TensorIndex
    rank: Column
    tensor: Column
    """Index of the tensor in ``index.tensors``."""
    start: Column
    stop: Column
    iteration: Column
    medium: Column
    domain_of: Mapping[int, str]
    """Failure domain of each rank."""

    @classmethod
    def of(cls, index: TensorIndex, rows: Iterable[Holding]) -> "Holdings":
        """Build the columns from ``rows``."""
        numbers, domains, table = index.number_of, {}, []
        for row in rows:
            domains[row.rank] = row.domain
            number = numbers[row.tensor.key]
            table.append((row.rank, number, row.start, row.stop, row.iteration, int(row.medium)))
        names = ("rank", "tensor", "start", "stop", "iteration", "medium")
        return cls(index=index, domain_of=domains, **_columns(names, table))

    @classmethod
    def of_needs(cls, needs: Needs, domain_of: Mapping[int, str], medium: Medium = Medium.LIVE) -> "Holdings":
        """Return the holdings, all on ``medium``, of ranks that have received the elements in ``needs``."""
        return cls(
            index=needs.index,
            rank=needs.rank,
            tensor=needs.tensor,
            start=needs.start,
            stop=needs.stop,
            iteration=needs.iteration,
            medium=np.full(len(needs), int(medium), dtype=np.int64),
            domain_of=domain_of,
        )

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Holding]:
        columns = (self.rank, self.tensor, self.start, self.stop, self.iteration, self.medium)
        for rank, tensor, start, stop, iteration, medium in zip(*(c.tolist() for c in columns), strict=True):
            yield Holding(
                rank=rank,
                domain=self.domain_of.get(rank, ""),
                tensor=self.index.tensors[tensor],
                start=start,
                stop=stop,
                iteration=iteration,
                medium=Medium(medium),
            )

    def and_also(self, other: "Holdings") -> "Holdings":
        """Return the rows of this object followed by the rows of ``other``; both must have the same index."""
        # Columns contain tensor numbers of one index. In another index a number may stand for another tensor.
        assert self.index is other.index, "both holdings must have the same tensor index"
        names = ("rank", "tensor", "start", "stop", "iteration", "medium")
        columns = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        return Holdings(index=self.index, domain_of={**self.domain_of, **other.domain_of}, **columns)

    def without(self, *, ranks: Collection[int] = (), domains: Collection[str] = ()) -> "Holdings":
        """Return the rows that remain if ``ranks`` and all ranks in the failure domains ``domains`` are lost.

        Rows on storage always remain.
        """
        lost = {rank for rank, domain in self.domain_of.items() if domain in domains} | set(ranks)
        # Storage is no rank: it survives every loss of ranks.
        lost.discard(STORAGE)
        return self.take(~np.isin(self.rank, sorted(lost)))

    def renumbered(self, new_ranks: Mapping[int, int]) -> "Holdings":
        """Return the rows with new rank numbers; ``new_ranks`` maps old numbers to new numbers.

        Rows of ranks that ``new_ranks`` does not contain are left out. Rows on storage remain.
        """
        numbers = {**new_ranks, STORAGE: STORAGE}
        kept = self.take(np.isin(self.rank, sorted(numbers)))
        old = np.array(sorted(numbers), dtype=np.int64)
        new = np.array([numbers[rank] for rank in old.tolist()], dtype=np.int64)
        domains = {new_ranks[rank]: name for rank, name in self.domain_of.items() if rank in new_ranks}
        return replace(kept, rank=new[np.searchsorted(old, kept.rank)], domain_of=domains)

    def take(self, rows: npt.NDArray[Any]) -> "Holdings":
        """Return the selected rows. ``rows`` is an array of row numbers or a boolean mask."""
        if rows.dtype == np.bool_ and rows.all():
            return self
        names = ("rank", "tensor", "start", "stop", "iteration", "medium")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def validate(self) -> None:
        """Check that the elements of every row are inside their tensor, and that exactly the rows with
        ``Medium.STORAGE`` have the rank ``STORAGE``.

        Raises:
            ConfigError: a row violates a condition; the message names the first such row.
        """
        _check_rows(self, lowest_rank=STORAGE)
        wrong = np.flatnonzero((self.rank == STORAGE) != (self.medium == int(Medium.STORAGE)))
        if len(wrong):
            row = next(iter(self.take(wrong[:1])))
            raise ConfigError.of(
                f"rank that holds {row.tensor}", row.rank, "must be -1 if the medium is storage, and a rank otherwise"
            )


def _columns(names: Sequence[str], table: Sequence[Sequence[int]]) -> dict[str, Column]:
    values = np.array(table, dtype=np.int64).reshape(len(table), len(names))
    return {name: np.ascontiguousarray(values[:, place]) for place, name in enumerate(names)}


def _check_rows(rows: Needs | Holdings, *, lowest_rank: int) -> None:
    is_inside = (rows.start >= 0) & (rows.start < rows.stop) & (rows.stop <= rows.index.sizes[rows.tensor])
    for row in np.flatnonzero(~is_inside | (rows.rank < lowest_rank))[:1].tolist():
        tensor = rows.index.tensors[rows.tensor[row]]
        value = f"elements {rows.start[row]} to {rows.stop[row]} on rank {rows.rank[row]}"
        constraint = f"must be a non-empty range of elements 0 to {tensor.num_elements}, on a rank of at least"
        raise ConfigError.of(str(tensor), value, f"{constraint} {lowest_rank}")

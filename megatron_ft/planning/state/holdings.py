"""``Holdings`` and ``Needs``: the elements of tensors at iterations that ranks have, and that they must have.

Both are stored as columns, because a job of thousands of ranks has a million of them. ``Holding`` and ``Need`` are
single rows.
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
"""Rank number of storage, which every rank reads by itself."""


class Medium(IntEnum):
    """Places of elements, fastest first."""

    LIVE = 0
    """Tensors that a rank trains with: its own part, a data-parallel peer's, an expert replica's."""
    STATE_COPY = 1
    """Optimizer state that a rank keeps for an owner on another failure domain."""
    OWN_WINDOW = 2
    """A window in the memory of the rank's own node."""
    PEER_WINDOW = 3
    """A copy of another node's window; the rank is one that can send it."""
    STORAGE = 4
    """A window or dense checkpoint that verifies, on storage; its rank is ``STORAGE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Elements [start, stop) of one tensor, of one iteration, that a rank must have.

    Holdings and needs number ranks in the same way, each living process once, spares and leaving ranks included.
    """

    rank: int
    tensor: StateTensor
    start: int
    stop: int
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Elements [start, stop) of one tensor, of one iteration, that a rank has."""

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
    """Needs as columns of equal length, in any order. Elements that a rank names twice are needed once."""

    index: TensorIndex
    rank: Column
    tensor: Column
    """Number in ``index``."""
    start: Column
    stop: Column
    iteration: Column

    @classmethod
    def of(cls, index: TensorIndex, rows: Iterable[Need]) -> "Needs":
        """Build the columns from single rows."""
        numbers = index.number_of
        table = [(row.rank, numbers[row.tensor.key], row.start, row.stop, row.iteration) for row in rows]
        return cls(index=index, **_columns(("rank", "tensor", "start", "stop", "iteration"), table))

    @classmethod
    def concatenate(cls, index: TensorIndex, parts: Sequence[Mapping[str, Column]]) -> "Needs":
        """Join columns, part after part."""
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
        """Bytes over all rows."""
        return int(((self.stop - self.start) * self.index.item_bytes[self.tensor]).sum())

    def validate(self) -> None:
        """Check that every row lies inside its tensor and names a rank.

        Raises:
            ConfigError: naming the row.
        """
        _check_rows(self, lowest_rank=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Holdings:
    """Holdings as columns of equal length, in any order."""

    index: TensorIndex
    rank: Column
    tensor: Column
    """Number in ``index``."""
    start: Column
    stop: Column
    iteration: Column
    medium: Column
    domain_of: Mapping[int, str]
    """Failure domain by rank."""

    @classmethod
    def of(cls, index: TensorIndex, rows: Iterable[Holding]) -> "Holdings":
        """Build the columns from single rows."""
        numbers, domains, table = index.number_of, {}, []
        for row in rows:
            domains[row.rank] = row.domain
            number = numbers[row.tensor.key]
            table.append((row.rank, number, row.start, row.stop, row.iteration, int(row.medium)))
        names = ("rank", "tensor", "start", "stop", "iteration", "medium")
        return cls(index=index, domain_of=domains, **_columns(names, table))

    @classmethod
    def of_needs(cls, needs: Needs, domain_of: Mapping[int, str], medium: Medium = Medium.LIVE) -> "Holdings":
        """Return the holdings of ranks after ``needs`` are met."""
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
        """Join these rows and those of ``other``, which has the same index."""
        # Columns hold numbers of one index; those of another one would name other tensors.
        assert self.index is other.index, "holdings have different indices"
        names = ("rank", "tensor", "start", "stop", "iteration", "medium")
        columns = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        return Holdings(index=self.index, domain_of={**self.domain_of, **other.domain_of}, **columns)

    def without(self, *, ranks: Collection[int] = (), domains: Collection[str] = ()) -> "Holdings":
        """Return the holdings after ``ranks`` and every rank of ``domains`` are lost; storage stays."""
        lost = {rank for rank, domain in self.domain_of.items() if domain in domains} | set(ranks)
        # Storage is no rank: it survives every loss of ranks.
        lost.discard(STORAGE)
        return self.take(~np.isin(self.rank, sorted(lost)))

    def renumbered(self, new_ranks: Mapping[int, int]) -> "Holdings":
        """Return the holdings with other numbers of ranks; rows of ranks that are not in ``new_ranks`` are left out,
        storage stays."""
        numbers = {**new_ranks, STORAGE: STORAGE}
        kept = self.take(np.isin(self.rank, sorted(numbers)))
        old = np.array(sorted(numbers), dtype=np.int64)
        new = np.array([numbers[rank] for rank in old.tolist()], dtype=np.int64)
        domains = {new_ranks[rank]: name for rank, name in self.domain_of.items() if rank in new_ranks}
        return replace(kept, rank=new[np.searchsorted(old, kept.rank)], domain_of=domains)

    def take(self, rows: npt.NDArray[Any]) -> "Holdings":
        """Return rows by number or by mask."""
        if rows.dtype == np.bool_ and rows.all():
            return self
        names = ("rank", "tensor", "start", "stop", "iteration", "medium")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def validate(self) -> None:
        """Check that every row lies inside its tensor, and that exactly the rows on storage have no rank.

        Raises:
            ConfigError: naming the row.
        """
        _check_rows(self, lowest_rank=STORAGE)
        wrong = np.flatnonzero((self.rank == STORAGE) != (self.medium == int(Medium.STORAGE)))
        if len(wrong):
            row = next(iter(self.take(wrong[:1])))
            raise ConfigError.of(
                f"holding of {row.tensor}", row.rank, "must name a rank, or storage with the medium storage"
            )


def _columns(names: Sequence[str], table: Sequence[Sequence[int]]) -> dict[str, Column]:
    values = np.array(table, dtype=np.int64).reshape(len(table), len(names))
    return {name: np.ascontiguousarray(values[:, place]) for place, name in enumerate(names)}


def _check_rows(rows: Needs | Holdings, *, lowest_rank: int) -> None:
    is_inside = (rows.start >= 0) & (rows.start < rows.stop) & (rows.stop <= rows.index.sizes[rows.tensor])
    for row in np.flatnonzero(~is_inside | (rows.rank < lowest_rank))[:1].tolist():
        tensor = rows.index.tensors[rows.tensor[row]]
        value = f"elements {rows.start[row]} to {rows.stop[row]} on rank {rows.rank[row]}"
        raise ConfigError.of(
            str(tensor), value, f"must be within 0 to {tensor.num_elements}, on a rank from {lowest_rank}"
        )

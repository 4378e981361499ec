"""``Demand``: the shards of state that every rank of a job has to capture, and arrays of their bytes [units, ranks]."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_ft.operators import SCALE_BLOCK_ELEMENTS, Component, OperatorId, StateShard
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan

Matrix = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes of each unit (operator or part of it, ``plan.Unit``) on each rank, without alignment."""

    full: Matrix
    """Bytes of the full state, ``[units, ranks]``."""
    frozen: Matrix
    """Bytes of compute weights only, ``[units, ranks]``."""

    def take(self, rows: Sequence[int]) -> "UnitBytes":
        """Return the bytes of only the units with the indices ``rows``, in that order."""
        return UnitBytes(full=self.full[list(rows)], frozen=self.frozen[list(rows)])

    def distinct_ranks(self) -> "UnitBytes":
        """Return the bytes of one rank from each group of ranks on which all units have the same sizes."""
        # Data-parallel ranks often capture equal sizes, and every step of a packing costs time for each column.
        columns = np.concatenate([self.full, self.frozen]).T
        first = sorted({column.tobytes(): rank for rank, column in reversed(list(enumerate(columns)))}.values())
        return UnitBytes(
            full=np.ascontiguousarray(self.full[:, first]), frozen=np.ascontiguousarray(self.frozen[:, first])
        )


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Shards of state that every rank has to capture."""

    shards_by_rank: tuple[tuple[StateShard, ...], ...]
    """Shards of each rank; the index is the rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        return len(self.shards_by_rank)

    @cached_property
    def operators(self) -> tuple[OperatorId, ...]:
        """Operators of all shards, sorted by layer, kind and expert."""
        found = {shard.operator for shards in self.shards_by_rank for shard in shards}
        return tuple(sorted(found, key=lambda operator: (operator.layer, operator.kind, operator.expert or 0)))

    @cached_property
    def operator_bytes(self) -> UnitBytes:
        """Bytes of whole operators on every rank, in the order of ``operators``."""
        return self.bytes_of([Unit(operator=operator) for operator in self.operators])

    @cached_property
    def rounding_bytes(self) -> Matrix:
        """Largest number of bytes by which a part exceeds its equal share when an operator is split into parts,
        ``[operators, ranks]``.

        Ranges are rounded to whole elements. Components without a value for each element, such as ``step``, are
        captured with every part.
        """
        values, found = self._table.values, np.zeros((len(self.operators), self.num_ranks), dtype=np.int64)
        # A range of quantized state is rounded to whole blocks.
        rounding = (values[:, 2] * values[:, 6]) + values[:, 3] + values[:, 7]
        np.add.at(found, (self._table.operators, values[:, 1]), rounding)
        return found

    def bytes_of(self, units: Sequence[Unit]) -> UnitBytes:
        """Return the bytes of ``units`` on every rank."""
        part = np.array([unit.part for unit in units], dtype=np.int64)
        num_parts = np.array([unit.num_parts for unit in units], dtype=np.int64)
        rows, shards = self._pairs(units)
        table = self._table.values[shards]
        sizes, ranks = table[:, 0], table[:, 1]
        # The ranges of ``Unit.range_of``, relative to the shard.
        block = table[:, 6]
        num_blocks = -(-sizes // block)
        ends = np.minimum(num_blocks * (part[rows] + 1) // num_parts[rows] * block, sizes)
        num_elements = ends - np.minimum(num_blocks * part[rows] // num_parts[rows] * block, sizes)
        num_blocks = -(-num_elements // block)
        shape = (len(units), self.num_ranks)
        full, frozen = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        # A rank may have several shards of an operator: ``+=`` with repeated indices would count only one of them.
        is_any = num_elements > 0
        np.add.at(full, (rows, ranks), num_elements * table[:, 2] + is_any * table[:, 3] + num_blocks * table[:, 7])
        np.add.at(frozen, (rows, ranks), num_elements * table[:, 4] + is_any * table[:, 5] + num_blocks * table[:, 8])
        return UnitBytes(full=full, frozen=frozen)

    def _pairs(self, units: Sequence[Unit]) -> tuple[Indices, Indices]:
        """Return all pairs (index of a unit in ``units``, index of a shard of the unit's operator) as two arrays."""
        row_of = {operator: row for row, operator in enumerate(self.operators)}
        of_unit = np.array([row_of[unit.operator] for unit in units], dtype=np.intp)
        # Without a loop in Python: a large job has millions of pairs of units and shards.
        by_operator = np.argsort(self._table.operators, kind="stable")
        bounds = np.searchsorted(self._table.operators[by_operator], np.arange(len(row_of) + 1))
        counts = np.diff(bounds)[of_unit]
        rows = np.repeat(np.arange(len(units)), counts)
        inside = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, by_operator[np.repeat(bounds[of_unit], counts) + inside]

    def slice_bytes(self, plan: WindowPlan) -> Matrix:
        """Return the bytes that each rank captures in each slice of ``plan``, ``[slices, ranks]``."""
        units = [unit for units in plan.slices for unit in units]
        bounds = np.cumsum([0, *(len(units) for units in plan.slices)])
        table = self.bytes_of(units)
        # ``reduceat`` would return a wrong value for an empty slice, but a valid plan has no empty slice.
        full = np.add.reduceat(table.full, bounds[:-1], axis=0)
        frozen = np.add.reduceat(table.frozen, bounds[:-1], axis=0)
        later: Matrix = frozen.sum(axis=0) - np.cumsum(frozen, axis=0)
        return full + later

    @cached_property
    def _table(self) -> "_ShardTable":
        return _shard_table(self.shards_by_rank, self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardTable:
    operators: Indices
    """Index of each shard's operator in ``Demand.operators``, ``[shards]``."""
    values: Matrix
    """Table ``[shards, 9]``. Columns: 0: element count; 1: rank; 2 and 3: bytes of the full state, per element and per
    shard; 4 and 5: bytes of the compute weights, per element and per shard; 6: elements per block (1 without scales);
    7 and 8: bytes per block, of the full state and of the compute weights."""


def _shard_table(shards_by_rank: Sequence[Sequence[StateShard]], known: Sequence[OperatorId]) -> _ShardTable:
    sizes: dict[int, tuple[int, int, int]] = {}

    def bytes_of(components: tuple[Component, ...]) -> tuple[int, int, int]:
        # A million shards share a few tuples of components. The id of a tuple is the key, because hashing it is slow.
        if id(components) not in sizes:
            sizes[id(components)] = _component_bytes(components)
        return sizes[id(components)]

    row_of = {operator: row for row, operator in enumerate(known)}
    operators, values = [], []
    for rank, shards in enumerate(shards_by_rank):
        for shard in shards:
            operators.append(row_of[shard.operator])
            full, frozen = bytes_of(shard.full), bytes_of(shard.frozen)
            block = SCALE_BLOCK_ELEMENTS if full[2] or frozen[2] else 1
            values.append((shard.stop - shard.start, rank, *full[:2], *frozen[:2], block, full[2], frozen[2]))
    return _ShardTable(
        operators=np.array(operators, dtype=np.intp), values=np.array(values, dtype=np.int64).reshape(-1, 9)
    )


def _component_bytes(components: Sequence[Component]) -> tuple[int, int, int]:
    """Return the bytes per element, per shard and per block of ``components``."""
    per_block = sum(component.item_bytes for component in components if component.per_block)
    per_element = sum(component.item_bytes for component in components if component.per_element) - per_block
    return per_element, sum(component.item_bytes for component in components if not component.per_element), per_block

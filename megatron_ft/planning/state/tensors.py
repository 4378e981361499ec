"""``TensorIndex``: numbers all tensors of a model's state, in the same way on every rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId

Column = npt.NDArray[np.int64]
TensorKey = tuple[str, int, str]
"""Key of a tensor: parameter name in the whole model, index of the tensor-parallel part, and kind of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """Flat tensor with one kind of state, such as ``exp_avg``, for one tensor-parallel part of a parameter."""

    operator: OperatorId
    parameter: str
    """Name of the parameter in the whole model."""
    tensor_part: int
    """Index of the tensor-parallel part; 0 if tensor parallelism does not split the parameter."""
    kind: str
    """Kind of state: ``weight``, ``master``, ``exp_avg``, ... Kinds that are always on the same ranks may be described
    as one kind with the sum of their bytes."""
    num_elements: int
    item_bytes: int

    @property
    def key(self) -> TensorKey:
        """Key of this tensor: name of the parameter, index of the tensor-parallel part, and kind of state."""
        return self.parameter, self.tensor_part, self.kind

    def __str__(self) -> str:
        return f"{self.parameter}[{self.tensor_part}]/{self.kind}"


@dataclass(frozen=True, eq=False)
class TensorIndex:
    """All tensors of a model's state, sorted by layer, operator, parameter, part and kind.

    The elements of all tensors are numbered consecutively in this order. The number of an element is its *position*, so
    a range of elements of one tensor is a range of positions, and sorting by position sorts by tensor.
    """

    tensors: tuple[StateTensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[StateTensor]) -> "TensorIndex":
        """Create the index of ``tensors``, which may be in any order and may contain equal entries.

        Raises:
            ConfigError: a tensor has no elements, has elements of 0 bytes, or has two entries that differ.
        """
        found: dict[TensorKey, StateTensor] = {}
        for tensor in tensors:
            if tensor.num_elements < 1 or tensor.item_bytes < 1:
                raise ConfigError.of(
                    str(tensor),
                    f"{tensor.num_elements} elements of {tensor.item_bytes} bytes",
                    "must have at least one element and one byte per element",
                )
            if found.setdefault(tensor.key, tensor) != tensor:
                raise ConfigError.of(
                    str(tensor),
                    repr(tensor),
                    f"must equal the earlier entry for the same tensor, {found[tensor.key]!r}",
                )
        # Sorted: ranks describe the model in different orders, and numbers must mean the same tensor on all of them.
        return cls(tuple(sorted(found.values(), key=_order)))

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def number_of(self) -> dict[TensorKey, int]:
        """Index of each tensor in ``tensors``, by the key of the tensor."""
        return {tensor.key: number for number, tensor in enumerate(self.tensors)}

    @cached_property
    def sizes(self) -> Column:
        """Number of elements of each tensor, ``[tensors]``."""
        return np.array([tensor.num_elements for tensor in self.tensors], dtype=np.int64)

    @cached_property
    def item_bytes(self) -> Column:
        """Bytes of one element of each tensor, ``[tensors]``."""
        return np.array([tensor.item_bytes for tensor in self.tensors], dtype=np.int64)

    @cached_property
    def starts(self) -> Column:
        """Position of the first element of each tensor, followed by the number of all elements, ``[tensors + 1]``."""
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.sizes, dtype=np.int64)])

    @property
    def num_positions(self) -> int:
        """Number of elements of all tensors together."""
        return int(self.starts[-1])

    def tensor_at(self, positions: Column) -> Column:
        """Return, for each position, the index of the tensor that contains the position."""
        return (np.searchsorted(self.starts, positions, side="right") - 1).astype(np.int64)


def _order(tensor: StateTensor) -> tuple[Any, ...]:
    operator = tensor.operator
    expert = -1 if operator.expert is None else operator.expert
    return operator.layer, operator.kind, expert, *tensor.key

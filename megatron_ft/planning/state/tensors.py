"""``TensorIndex``: every tensor of a model's state under one number, the same on every rank."""

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
"""Global name of a parameter, its tensor-parallel part, kind of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One kind of state of one tensor-parallel part of one parameter, flattened."""

    operator: OperatorId
    parameter: str
    """Global name."""
    tensor_part: int
    """Tensor-parallel part; 0 where the parameter is not split."""
    kind: str
    """``weight``, ``master``, ``exp_avg``... Kinds that are always in the same place may be one kind with more
    bytes."""
    num_elements: int
    item_bytes: int

    @property
    def key(self) -> TensorKey:
        """Identity of this tensor."""
        return self.parameter, self.tensor_part, self.kind

    def __str__(self) -> str:
        return f"{self.parameter}[{self.tensor_part}]/{self.kind}"


@dataclass(frozen=True, eq=False)
class TensorIndex:
    """Tensors in order of layer, operator, parameter, part and kind, concatenated to one line of elements.

    The order does not depend on the order in which they are given. A range of elements of one tensor is a range of
    *positions* on the line, so sorting positions sorts by tensor.
    """

    tensors: tuple[StateTensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[StateTensor]) -> "TensorIndex":
        """Make the index of ``tensors``, sorted; equal entries count once.

        Raises:
            ConfigError: no elements, no bytes, or two entries of one tensor that differ.
        """
        found: dict[TensorKey, StateTensor] = {}
        for tensor in tensors:
            if tensor.num_elements < 1 or tensor.item_bytes < 1:
                raise ConfigError.of(
                    str(tensor), tensor.num_elements, "must have at least one element and one byte per element"
                )
            if found.setdefault(tensor.key, tensor) != tensor:
                raise ConfigError.of(str(tensor), tensor, f"is described twice, also as {found[tensor.key]}")
        # Sorted: ranks describe the model in different orders, and numbers must mean the same tensor on all of them.
        return cls(tuple(sorted(found.values(), key=_order)))

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def number_of(self) -> dict[TensorKey, int]:
        """Number of each tensor."""
        return {tensor.key: number for number, tensor in enumerate(self.tensors)}

    @cached_property
    def sizes(self) -> Column:
        """Elements of each tensor, ``[tensors]``."""
        return np.array([tensor.num_elements for tensor in self.tensors], dtype=np.int64)

    @cached_property
    def item_bytes(self) -> Column:
        """Bytes of one element of each tensor, ``[tensors]``."""
        return np.array([tensor.item_bytes for tensor in self.tensors], dtype=np.int64)

    @cached_property
    def starts(self) -> Column:
        """Position of the first element of each tensor, and the end of the line, ``[tensors + 1]``."""
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.sizes, dtype=np.int64)])

    @property
    def num_positions(self) -> int:
        """Elements of all tensors."""
        return int(self.starts[-1])

    def tensor_at(self, positions: Column) -> Column:
        """Number of the tensor at each position."""
        return (np.searchsorted(self.starts, positions, side="right") - 1).astype(np.int64)


def _order(tensor: StateTensor) -> tuple[Any, ...]:
    operator = tensor.operator
    expert = -1 if operator.expert is None else operator.expert
    return operator.layer, operator.kind, expert, *tensor.key

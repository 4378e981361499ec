"""Describes the state that snapshots capture: the components of each parameter, and the element ranges of each rank.

A component is one tensor of a parameter's state, e.g. the master weight. Each parameter has two lists of components.
``full`` lists the whole state. ``frozen`` lists the state that is sufficient to compute with the parameter, without
updating it. A rank captures one element range of each of its parameters.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.operators import OperatorId

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")
SCALE_BLOCK_ELEMENTS = 64
"""Number of elements in a block of a flattened parameter with quantized state. The elements of a block share one scale.
A captured range of such a parameter begins at a multiple of this number, so that no range divides a block."""

_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One tensor of a parameter's state, such as ``weight``, ``master``, ``exp_avg``, ``exp_avg_sq`` or ``step``."""

    name: str
    dtype: str
    """Name of the dtype in torch, e.g. ``float32``."""
    item_bytes: int
    """Bytes of one value."""
    per_element: bool = True
    """Whether the component has values per element or per block. Otherwise it has one value for the whole shard, which
    every captured part of the shard repeats."""
    per_block: bool = False
    """Whether the component contains scales of quantized state: one value for each block of ``SCALE_BLOCK_ELEMENTS``
    elements. The last block may have fewer elements. The name of such a component ends with ``_scales``."""

    def num_values(self, num_elements: int) -> int:
        """Return how many values the component has for ``num_elements`` consecutive elements of a parameter. If it has
        values per block, the first of these elements must be the first of a block."""
        if not self.per_element:
            return int(num_elements > 0)
        return -(-num_elements // SCALE_BLOCK_ELEMENTS) if self.per_block else num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """Range of elements of one parameter whose state one rank captures."""

    operator: OperatorId
    parameter: str
    """Name of the parameter, equal on all ranks."""
    tensor_part: int
    """Index of the tensor-parallel part of the parameter; 0 if the parameter is not split."""
    start: int
    """Index of the first captured element in the flattened tensor-parallel part."""
    stop: int
    """Index after the last captured element."""
    full: tuple[Component, ...]
    """Components of the parameter's full state, which training needs to update it."""
    frozen: tuple[Component, ...]
    """Components that a frozen (not updated) operator needs to compute outputs and the gradients of its inputs."""

    @property
    def num_elements(self) -> int:
        """Number of captured elements."""
        return self.stop - self.start

    @property
    def block_elements(self) -> int:
        """Number of elements in a block that shares one scale; 1 without scales. Cut the shard only between blocks."""
        return block_elements((*self.full, *self.frozen))


def block_elements(components: Iterable[Component]) -> int:
    """Return the number of elements in a block that shares one scale, or 1 without scales. Cut only between blocks."""
    return SCALE_BLOCK_ELEMENTS if any(component.per_block for component in components) else 1


def operator_of(parameter: str, num_layers: int) -> OperatorId:
    """Return the operator (the unit of snapshots) to which a parameter belongs, by the parameter's global name.

    Every routed expert and every gate is an operator. All other parameters of a layer together are one operator
    (MoEvement, section 3.2; appendix E for layers).
    """
    layer = _LAYER.search(parameter)
    if layer is None:
        # Embedding and head get layer numbers that no layer of the model has.
        is_embedding = parameter.startswith("embedding.")
        return OperatorId(layer=0, kind="embedding") if is_embedding else OperatorId(layer=num_layers + 1, kind="head")
    # Names of parameters count layers from 0, and Megatron's layer numbers count from 1.
    number = int(layer[1]) + 1
    expert = _EXPERT.search(parameter)
    if expert is not None:
        return OperatorId(layer=number, kind="expert", expert=int(expert[1]))
    kind = "gate" if ".mlp.router." in parameter else "non_expert"
    return OperatorId(layer=number, kind=kind)  # type: ignore[arg-type]


def check_shards(shards_by_rank: Sequence[Iterable[StateShard]], sizes: Mapping[tuple[str, int], int]) -> None:
    """Assert that the captured ranges of all ranks together contain every element of every parameter exactly once.

    Args:
        sizes: number of elements of each (parameter, tensor-parallel part).
    """
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {key: [] for key in sizes}
    for shards in shards_by_rank:
        for shard in shards:
            assert shard.start % shard.block_elements == 0, (
                f"{shard.parameter}: element {shard.start} is inside a block"
            )
            ranges[shard.parameter, shard.tensor_part].append((shard.start, shard.stop))
    for key, found in ranges.items():
        position = 0
        # A gap would lose state without an error; an element that two ranks capture would have two values.
        for start, stop in sorted(found):
            problem = "captured twice" if start < position else "not captured"
            assert start == position, f"{key}: elements between {position} and {start} are {problem}"
            position = stop
        assert position == sizes[key], f"{key}: elements from {position} to {sizes[key]} are not captured"

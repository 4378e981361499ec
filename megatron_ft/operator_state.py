"""State of an operator, independent of the layout: components, and the shards that ranks capture.

A rank captures one element range of each of its parameters. The full state of an operator (``full``) and the state of a
frozen one (``frozen``) are lists of components, so a precision with scales only adds components.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.operators import OperatorId

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One tensor of a parameter's state: ``weight``, ``master``, ``exp_avg``, ``exp_avg_sq``, ``step``..."""

    name: str
    dtype: str
    """Name in torch, e.g. ``float32``."""
    item_bytes: int
    """Bytes of one value."""
    per_element: bool = True
    """Whether every element has a value; otherwise a shard has one value, which is captured with each of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """The part of one parameter that one rank captures."""

    operator: OperatorId
    parameter: str
    """Global name, which identifies the tensor."""
    tensor_part: int
    """Index of the tensor-parallel part of the parameter; 0 where it is not split."""
    start: int
    """First element, in the flattened part."""
    stop: int
    """Element after the last."""
    full: tuple[Component, ...]
    """Components of the full state."""
    frozen: tuple[Component, ...]
    """Components that a frozen operator needs to compute outputs and input gradients."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the range."""
        return self.stop - self.start


def operator_of(parameter: str, num_layers: int) -> OperatorId:
    """Return the operator of a parameter, by its global name (MoEvement, section 3.2; appendix E for layers).

    Every routed expert and every gate is an operator, and so is the rest of each layer.
    """
    layer = _LAYER.search(parameter)
    if layer is None:
        # Layer numbers outside of the model keep both apart from every layer.
        is_embedding = parameter.startswith("embedding.")
        return OperatorId(layer=0, kind="embedding") if is_embedding else OperatorId(layer=num_layers + 1, kind="head")
    # Parameters count layers from 0, Megatron's layer numbers from 1.
    number = int(layer[1]) + 1
    expert = _EXPERT.search(parameter)
    if expert is not None:
        return OperatorId(layer=number, kind="expert", expert=int(expert[1]))
    kind = "gate" if ".mlp.router." in parameter else "non_expert"
    return OperatorId(layer=number, kind=kind)  # type: ignore[arg-type]


def check_shards(shards_by_rank: Sequence[Iterable[StateShard]], sizes: Mapping[tuple[str, int], int]) -> None:
    """Assert that the shards of all ranks together cover every element of every parameter exactly once.

    Args:
        sizes: elements of each (parameter, tensor part).
    """
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {key: [] for key in sizes}
    for shards in shards_by_rank:
        for shard in shards:
            ranges[shard.parameter, shard.tensor_part].append((shard.start, shard.stop))
    for key, found in ranges.items():
        position = 0
        # A gap would lose state without an error; an element that two ranks capture would have two values.
        for start, stop in sorted(found):
            assert start == position, (
                f"{key}: elements {position} to {start} are {'captured twice' if start < position else 'not captured'}"
            )
            position = stop
        assert position == sizes[key], f"{key}: elements {position} to {sizes[key]} are not captured"

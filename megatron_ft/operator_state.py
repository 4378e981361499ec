"""An operator's state, described independently of layout: components, and the shards that ranks capture.

Of every parameter a rank captures one element range. What an active operator needs (``full``) and what a frozen one
needs (``frozen``) are lists of components, so that a precision with scales beside its codes adds names, not code.
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
    """torch's name of it, e.g. ``float32``."""
    item_bytes: int
    """Bytes of one value."""
    per_element: bool = True
    """Whether there is a value for each element; otherwise one for the whole shard, captured with every part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """The part of one parameter that one rank captures."""

    operator: OperatorId
    parameter: str
    """Global name: the one identity of a tensor."""
    tensor_part: int
    """Which tensor-parallel part of the parameter; 0 where it is not split."""
    start: int
    """First element, in the flattened part."""
    stop: int
    """Element after the last."""
    full: tuple[Component, ...]
    """What an active operator's state consists of."""
    frozen: tuple[Component, ...]
    """What a frozen operator needs to compute forward and input gradients."""

    @property
    def num_elements(self) -> int:
        """Elements of the range."""
        return self.stop - self.start



def operator_of(parameter: str, num_layers: int) -> OperatorId:
    """The operator that a parameter, by its global name, belongs to (MoEvement, section 3.2; appendix E for layers).

    Every parameter belongs to exactly one: routed experts and gates are their own, the rest of a layer is one.
    """
    layer = _LAYER.search(parameter)
    if layer is None:
        is_embedding = parameter.startswith("embedding.")
        return OperatorId(layer=0, kind="embedding") if is_embedding else OperatorId(layer=num_layers + 1, kind="head")
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
        for start, stop in sorted(found):
            assert start == position, (
                f"{key}: elements {position} to {start} are captured {'twice' if start < position else 'by nobody'}"
            )
            position = stop
        assert position == sizes[key], f"{key}: elements {position} to {sizes[key]} are captured by nobody"

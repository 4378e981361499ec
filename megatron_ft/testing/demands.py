"""Makes demands (``Demand``: the state that each rank must capture) of imaginary jobs, to test snapshot policies."""

import math
import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from megatron_ft.operators import Component, OperatorId, StateShard
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.policy import SnapshotContext

MASTERS = tuple(Component(name=name, dtype="float32", item_bytes=4) for name in ("master", "exp_avg", "exp_avg_sq"))
STEP = Component(name="step", dtype="float32", item_bytes=4, per_element=False)
WEIGHT = Component(name="weight", dtype="bfloat16", item_bytes=2)


def shard(
    operator: OperatorId, stop: int, start: int = 0, full: tuple[Component, ...] = (*MASTERS, STEP), name: str = "w"
) -> StateShard:
    return StateShard(
        operator=operator,
        parameter=f"{operator}.{name}",
        tensor_part=0,
        start=start,
        stop=stop,
        full=full,
        frozen=(WEIGHT,),
    )


class Stored(Protocol):
    """Type (``typing.Protocol``) for number formats of stored state, e.g. ``transformer_engine_ext.formats.Format``."""

    @property
    def name(self) -> str: ...

    @property
    def item_bytes(self) -> int: ...


def quantized(parts: Iterable[tuple[str, Stored, bool]]) -> tuple[Component, ...]:
    """Return the components of quantized tensors: for each tensor its codes, and also its scales if it has scales.
    Each of ``parts`` is (name, format, whether there are scales), as the methods ``full`` and ``frozen`` of
    ``transformer_engine_ext.regimes.Regime`` yield them."""
    found = []
    for name, target, has_scales in parts:
        found.append(Component(name=name, dtype=target.name, item_bytes=target.item_bytes))
        if has_scales:
            found.append(Component(name=f"{name}_scales", dtype="uint8", item_bytes=1, per_block=True))
    return tuple(found)


def algorithm_1(full_bytes: float, frozen_bytes: float, budget_bytes: float, num_operators: int) -> int:
    """Compute the number of iterations of a snapshot window with algorithm 1 of the MoEvement paper, for operators of
    equal size. All sizes are bytes per model parameter; one iteration can copy ``budget_bytes`` per parameter."""
    active = num_operators
    while active > 2:
        if full_bytes * active + frozen_bytes * (num_operators - active) <= budget_bytes * num_operators:
            break
        active -= 1
    return math.ceil(num_operators / active)


def expert(layer: int, number: int) -> OperatorId:
    return OperatorId(layer=layer, kind="expert", expert=number)


def rest(layer: int) -> OperatorId:
    return OperatorId(layer=layer, kind="non_expert")


EMBEDDING = OperatorId(layer=0, kind="embedding")


def equal_experts(num_operators: int, num_elements: int = 100) -> Demand:
    """Make the demand (state to capture) of a job with one rank, whose operators are equally large and have no step
    counts. The MoEvement paper's algorithm 1 covers this case."""
    return Demand(
        shards_by_rank=(tuple(shard(expert(1, number), num_elements, full=MASTERS) for number in range(num_operators)),)
    )


def one_huge_embedding() -> Demand:
    """Make the demand (state to capture) of a job with two ranks, whose state belongs mostly to the embedding."""
    small = [expert(layer, number) for layer in (1, 2) for number in range(4)]
    return Demand(
        shards_by_rank=tuple(
            (shard(EMBEDDING, 40_000), *(shard(operator, 500) for operator in small)) for _ in range(2)
        )
    )


def dense_model(num_layers: int = 6) -> Demand:
    """Make the demand (state to capture) of a model without experts, on two ranks with equally large shards."""
    operators = [EMBEDDING, *map(rest, range(1, num_layers + 1)), OperatorId(layer=num_layers + 1, kind="head")]
    return Demand(shards_by_rank=tuple(tuple(shard(operator, 1000) for operator in operators) for _ in range(2)))


def uneven(num_ranks: int = 5, seed: int = 0) -> Demand:
    """Make the demand (state to capture) of a job with operators of many sizes. Each expert is on one rank. Other
    operators are on two ranks. One rank has almost no state."""
    rng = random.Random(seed)
    ranks: list[list[StateShard]] = [[] for _ in range(num_ranks)]
    for layer in range(1, 5):
        for number in range(8):
            ranks[number % (num_ranks - 1)].append(shard(expert(layer, number), rng.randint(1, 900)))
        for rank in rng.sample(range(num_ranks), 2):
            ranks[rank].append(shard(rest(layer), 3000 + rank, start=17, name="attention"))
            ranks[rank].append(shard(rest(layer), rng.randint(1, 40), name="norm"))
    ranks[-1].append(shard(EMBEDDING, 3))
    ranks[0].append(shard(EMBEDDING, 4, start=3))
    return Demand(shards_by_rank=tuple(map(tuple, ranks)))


def context(demand: Demand, share: float, seconds: float = 2.0) -> SnapshotContext:
    """Make a ``SnapshotContext`` in which one iteration can capture ``share`` of the largest full state of any rank."""
    whole = max(sum(sizes) for sizes in full_bytes(demand))
    return SnapshotContext(bandwidth_bytes_per_second=max(1, int(whole * share)) / seconds, iteration_seconds=seconds)


def full_bytes(demand: Demand) -> Sequence[Sequence[int]]:
    """Return the size in bytes of each shard's full state, in one list per rank. Does not use the code under test."""
    return [
        [
            sum(component.item_bytes * (found.num_elements if component.per_element else 1) for component in found.full)
            for found in shards
        ]
        for shards in demand.shards_by_rank
    ]

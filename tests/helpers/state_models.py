"""Provides small models and placements for tests of holdings and needs."""

from collections.abc import Mapping, Sequence

from megatron_ft.operators import OperatorId
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.state.model_state import ModelState, Parameter
from megatron_ft.planning.state.parallel_layout import ParallelLayout


def model(
    *,
    tensor_size: int = 1,
    num_stages: int = 1,
    num_chunks: int = 1,
    num_experts: int = 2,
    is_tied: bool = False,
    expert_tensor_size: int = 1,
    scale: int = 1,
) -> ModelState:
    """Return a model with one layer per chunk: a split matrix, a repeated norm, experts of two matrices, an embedding
    and a head.

    Sizes are odd numbers of elements, times ``scale``.
    """
    stages = []
    last = num_stages * num_chunks
    for stage in range(num_stages):
        chunks = []
        for chunk in range(num_chunks):
            layer = chunk * num_stages + stage + 1
            chunks.append(tuple(_chunk(layer, last, num_experts, is_tied, scale)))
        stages.append(tuple(chunks))
    return ModelState(
        chunks=tuple(stages),
        num_experts=num_experts,
        tensor_size=tensor_size,
        expert_tensor_size=expert_tensor_size,
        optimizer_kinds=(("master", 4), ("exp_avg", 4)),
    )


def _chunk(layer: int, last: int, num_experts: int, is_tied: bool, scale: int) -> list[Parameter]:
    embedding = Parameter(
        name="embedding.weight",
        operator=OperatorId(layer=0, kind="embedding"),
        num_elements=90 * scale,
        is_split=True,
        is_shared_embedding=is_tied,
    )
    found = [embedding] if layer == 1 else []
    rest = OperatorId(layer=layer, kind="non_expert")
    found.append(Parameter(name=f"layers.{layer}.qkv", operator=rest, num_elements=75 * scale, is_split=True))
    found.append(
        Parameter(
            name=f"layers.{layer}.norm",
            operator=rest,
            num_elements=7 * scale,
            is_split=False,
            dtype="float32",
            weight_bytes=4,
        )
    )
    for expert in range(num_experts):
        operator = OperatorId(layer=layer, kind="expert", expert=expert)
        for name, size in (("fc1", 40), ("fc2", 23)):
            name = f"layers.{layer}.experts.{expert}.{name}"
            found.append(Parameter(name=name, operator=operator, num_elements=size * scale, is_split=True))
    if layer == last:
        head = Parameter(
            name="head.weight", operator=OperatorId(layer=last + 1, kind="head"), num_elements=90 * scale, is_split=True
        )
        found.append(embedding if is_tied else head)
    return found


def placements(
    layout: ParallelLayout, layers: Sequence[Sequence[int]], num_experts: int, num_slots: int, shift: int = 0
) -> tuple[PlacementPlan, ...]:
    """Assign experts to slots in turn, beginning with another expert in each layer. ``layers`` are the layers of each
    stage."""
    plans = []
    for stage, numbers in enumerate(layers):
        ranks = tuple(rank for group in layout.stages[stage] for rank in group)
        slots = tuple(
            tuple(
                tuple(sorted((layer + shift + place * num_slots + slot) % num_experts for slot in range(num_slots)))
                for place in range(len(ranks))
            )
            for layer in numbers
        )
        plans.append(
            PlacementPlan(
                num_experts=num_experts,
                num_slots_per_rank=num_slots,
                ranks=ranks,
                domains=tuple(f"node{rank}" for rank in ranks),
                layer_numbers=tuple(numbers),
                slots=slots,
                algorithm="test",
            )
        )
    return tuple(plans)


def domains(layout: ParallelLayout, ranks_per_node: int = 1) -> Mapping[int, str]:
    """Return failure domains of ``ranks_per_node`` ranks each."""
    return {rank: f"node{rank // ranks_per_node}" for rank in (*layout.ranks, *layout.spares)}

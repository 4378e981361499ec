"""Number of parameters per rank."""

from dataclasses import dataclass

from megatron_ft.config.model import ModelConfig
from megatron_ft.operators import Operator
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """Number of parameters of a rank, equal on all ranks of a stage.

    Data parallelism repeats dense parameters DP * CP times, those of experts expert-DP times.
    """

    num_dense: int
    num_expert: int

    @property
    def total(self) -> int:
        return self.num_dense + self.num_expert


def parameters_of_stage(
    model: ModelConfig,
    operators: tuple[Operator, ...],
    topology: Topology,
    pipeline_stage: int,
    num_slots_per_rank: int | None = None,
) -> RankParameters:
    """Count the parameters of each rank of a pipeline stage, over all its virtual chunks.

    With replica slots a rank is counted with ``num_slots_per_rank`` experts per layer, the most that it can hold.
    """
    # All experts of a layer have the same size: the first ones stand for those that a rank holds.
    num_local_experts = (model.num_moe_experts or 0) // topology.expert_model_parallel_size
    if num_slots_per_rank is not None:
        num_local_experts = min(num_slots_per_rank, model.num_moe_experts or 0)
    held = _held_layers(model, topology, pipeline_stage)
    mine = [operator for operator in operators if operator.id.layer in held]
    dense = [operator for operator in mine if operator.id.kind != "expert"]
    num_dense = sum(_on_rank(operator, topology.tensor_model_parallel_size) for operator in dense)
    num_experts = sum(
        _on_rank(operator, topology.expert_tensor_parallel_size)
        for operator in mine
        if operator.id.expert is not None and operator.id.expert < num_local_experts
    )
    return RankParameters(
        num_dense=num_dense + _tied_copy(model, operators, topology, pipeline_stage), num_expert=num_experts
    )


def _held_layers(model: ModelConfig, topology: Topology, pipeline_stage: int) -> set[int]:
    layers = set(topology.stage_layers(model.num_layers, pipeline_stage))
    if pipeline_stage == 0:
        layers.add(0)
    if pipeline_stage == topology.pipeline_model_parallel_size - 1:
        layers.add(model.num_layers + 1)
    return layers


def _on_rank(operator: Operator, split_over: int) -> int:
    return operator.num_split_parameters // split_over + operator.num_repeated_parameters


def _tied_copy(model: ModelConfig, operators: tuple[Operator, ...], topology: Topology, pipeline_stage: int) -> int:
    last = topology.pipeline_model_parallel_size - 1
    if model.untie_embeddings_and_output_weights or last == 0 or pipeline_stage != last:
        return 0
    return operators[0].num_split_parameters // topology.tensor_model_parallel_size

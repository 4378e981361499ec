"""Computes parameters and memory of a rank. State is counted exactly; activations and processes are estimated."""

from dataclasses import dataclass

from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import ModelConfig
from megatron_ft.operators import SCALE_BLOCK_ELEMENTS, Operator, head_channels, is_moe_layer, operators_of
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """Number of parameters on one rank; all ranks of a pipeline stage have equal numbers.

    The job has DP * CP copies of each dense parameter, and expert-DP copies of each expert parameter.
    """

    num_dense: int
    num_expert: int

    @property
    def total(self) -> int:
        return self.num_dense + self.num_expert

    @classmethod
    def of_stage(
        cls,
        model: ModelConfig,
        operators: tuple[Operator, ...],
        topology: Topology,
        pipeline_stage: int,
        num_slots_per_rank: int | None = None,
    ) -> "RankParameters":
        """Count the parameters of one rank of a pipeline stage, over all virtual chunks of the stage.

        With replica slots, each rank is counted with ``num_slots_per_rank`` experts per layer, as if all its slots had
        different experts.
        """
        # All experts of a layer have the same size, so the first experts represent the experts of any rank.
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
        return cls(num_dense=num_dense + _tied_copy(model, operators, topology, pipeline_stage), num_expert=num_experts)


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


BYTES_PER_VALUE = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32_BYTES = 4
STATE_DTYPES = {"fp8": ("float8_e4m3fn", 1), "fp16": ("float16", 2), "fp32": ("float32", 4)}
"""Torch dtype and bytes per value, for each number format of optimizer state."""
OPTIMIZER_BYTES = 3 * FP32_BYTES
"""Bytes of the master weight and the two moments of one parameter in a checkpoint."""
PROCESS_BYTES = 450_000_000
"""Estimated host memory of a rank's Python process that has imported torch and Megatron."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank's device.

    Weights, gradients, master weights and moments are exact except for the padding of Megatron's flat buffers. State
    copies are counted as if they were divided evenly among ranks. Activations are an estimate of the peak.
    """

    weights_bytes: int
    gradients_bytes: int
    master_bytes: int
    moments_bytes: int
    copies_bytes: int
    """Copies of other ranks' optimizer state (``placement.state_copies``), and the gradients of these copies."""
    activations_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes on the rank's device without activations."""
        of_rank = self.weights_bytes + self.gradients_bytes + self.master_bytes + self.moments_bytes
        return of_rank + self.copies_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes on the rank's device, including the estimate of activations."""
        return self.state_bytes + self.activations_bytes

    @classmethod
    def of_stage(
        cls, config: JobConfig, parameters: RankParameters, topology: Topology, pipeline_stage: int, vocab_size: int
    ) -> "RankMemory":
        """Compute the memory of each rank of a stage. ``vocab_size`` includes padding.

        FP32 weights have no separate master weights. The distributed optimizer shards master weights and the two FP32
        moments: for dense parameters over DP * CP ranks, for experts over the expert-data-parallel ranks.
        """
        value_bytes = BYTES_PER_VALUE[config.precision.params_dtype]
        gradient_bytes = FP32_BYTES if config.precision.grad_reduce_in_fp32 else value_bytes
        master_bytes, moments_bytes = optimizer_bytes(config, _updated_here(config, parameters, topology))
        copied = _copied_here(config, parameters, topology)
        return cls(
            weights_bytes=parameters.total * value_bytes,
            gradients_bytes=parameters.total * gradient_bytes,
            master_bytes=master_bytes,
            moments_bytes=moments_bytes,
            copies_bytes=_copies_bytes(config, copied),
            activations_bytes=_activation_bytes(config, topology, pipeline_stage, vocab_size),
        )


def optimizer_bytes(config: JobConfig, num_parameters: int) -> tuple[int, int]:
    """Return two sizes in bytes for ``num_parameters`` parameters: of the master weights, and of both moments together.
    Scales of low-precision formats are included. FP32 weights have no separate master weights."""
    formats = config.precision.optimizer_formats
    if formats is None:
        value_bytes = BYTES_PER_VALUE[config.precision.params_dtype]
        return (0 if value_bytes == FP32_BYTES else num_parameters * FP32_BYTES), num_parameters * 2 * FP32_BYTES
    scales = -(-num_parameters // SCALE_BLOCK_ELEMENTS)
    sizes = [num_parameters * STATE_DTYPES[name][1] + (scales if name != "fp32" else 0) for name in formats]
    return sizes[0], sizes[1] + sizes[2]


def expert_state_bytes(config: JobConfig) -> int:
    """Return the bytes of weights, master weights, moments and step counts of one routed expert in one layer."""
    expert = next(operator for operator in operators_of(config.model, 1) if operator.id.kind == "expert")
    # PyTorch's Adam keeps one FP32 step count for each tensor.
    num_tensors = 2 if not config.model.add_bias_linear else 4
    value_bytes = BYTES_PER_VALUE[config.precision.params_dtype]
    state_bytes = sum(optimizer_bytes(config, expert.num_parameters))
    return expert.num_parameters * value_bytes + state_bytes + num_tensors * FP32_BYTES


def _copies_bytes(config: JobConfig, num_parameters: int) -> int:
    """Return the bytes of copied optimizer state and of its gradients. A copy has its own master weights, even if the
    weights of the model are FP32."""
    if config.precision.regime is None:
        return num_parameters * 4 * FP32_BYTES
    return sum(optimizer_bytes(config, num_parameters)) + num_parameters * FP32_BYTES


def _updated_here(config: JobConfig, parameters: RankParameters, topology: Topology) -> int:
    if not config.parallel.use_distributed_optimizer:
        return parameters.total
    dense_shards = topology.data_parallel_size * topology.context_parallel_size
    return -(-parameters.num_dense // dense_shards) + -(-parameters.num_expert // topology.expert_data_parallel_size)


def _copied_here(config: JobConfig, parameters: RankParameters, topology: Topology) -> int:
    """Return the number of parameters whose optimizer state a rank copies from other ranks (mean over ranks). It
    is assumed that each expert has ``placement.min_replicas`` replicas, or fewer if there are too few slots."""
    placement, stage_size = config.placement, topology.stage_size
    if placement.state_copies is None:
        return 0
    if placement.algorithm is None:  # a rank's shard also contains the state of its experts
        return _updated_here(config, parameters, topology) * (placement.state_copies - 1)
    # Non-expert state is copied only with the distributed optimizer: otherwise every rank has all of it. An expert is
    # copied only if it has fewer replicas than ``state_copies``.
    shard = -(-parameters.num_dense // (topology.data_parallel_size * topology.context_parallel_size))
    num_dense = shard * (placement.state_copies - 1) if config.parallel.use_distributed_optimizer else 0
    num_slots, num_experts = placement.num_slots_per_rank or 0, config.model.num_moe_experts or 0
    per_expert = parameters.num_expert // max(1, num_slots)
    num_held = min(placement.min_replicas * num_experts, num_slots * stage_size)
    return num_dense + -(-max(0, placement.state_copies * num_experts - num_held) * per_expert // stage_size)


def _activation_bytes(config: JobConfig, topology: Topology, pipeline_stage: int, vocab_size: int) -> int:
    """Estimate the peak bytes of a rank's activations.

    The estimate is the sum of the values that each layer stores for its backward pass, times the number of microbatches
    in flight in the 1F1B schedule. The last stage also has the logits, in the compute format and in FP32. Experts are
    assumed to have equal loads.
    """
    model, last = config.model, topology.pipeline_model_parallel_size - 1
    value_bytes = BYTES_PER_VALUE[config.precision.params_dtype]
    ranks_per_sequence = topology.tensor_model_parallel_size * topology.context_parallel_size
    num_tokens = config.training.micro_batch_size * model.seq_length
    recompute = config.training.recompute_granularity
    layers = topology.stage_layers(model.num_layers, pipeline_stage)
    values = sum(_layer_values(model, layer, recompute) for layer in layers)
    num_microbatches = -(-config.training.global_batch_size // config.training.micro_batch_size)
    # A rank cannot have more microbatches in flight than it has in an iteration.
    per_rank = -(-num_microbatches // topology.data_parallel_size)
    in_flight = min(per_rank, _microbatches_in_flight(topology, pipeline_stage))
    kept = values * num_tokens * value_bytes // ranks_per_sequence * in_flight
    logits = num_tokens * vocab_size * (value_bytes + FP32_BYTES) // ranks_per_sequence
    return kept + (logits if pipeline_stage == last else 0)


def _microbatches_in_flight(topology: Topology, pipeline_stage: int) -> int:
    """Return the largest number of microbatches that a stage has in flight in Megatron's 1F1B schedule.

    An interleaved schedule warms up with (PP - stage - 1) * 2 + (VPP - 1) * PP forward passes of single chunks. This
    number plus one, divided by VPP and rounded up, is the result.
    """
    pp, vpp = topology.pipeline_model_parallel_size, topology.virtual_pipeline_model_parallel_size
    if vpp == 1:
        return pp - pipeline_stage
    return -(-((pp - pipeline_stage - 1) * 2 + (vpp - 1) * pp + 1) // vpp)


def saving_bytes(config: JobConfig, parameters: RankParameters, topology: Topology) -> int:
    """Return the bytes of state that one rank copies to host memory and writes when a dense checkpoint is saved.
    Data-parallel ranks divide the state among themselves. With ``checkpoint.fully_parallel=false``, one of these ranks
    writes all weights; the result is for this rank."""
    value_bytes = BYTES_PER_VALUE[config.precision.params_dtype]
    dense = topology.data_parallel_size * topology.context_parallel_size
    expert = topology.expert_data_parallel_size

    def written(dense_ranks: int, expert_ranks: int) -> int:
        return -(-parameters.num_dense // dense_ranks) + -(-parameters.num_expert // expert_ranks)

    weights = written(dense, expert) if config.checkpoint.fully_parallel else written(1, 1)
    if config.parallel.use_distributed_optimizer:
        return weights * value_bytes + written(dense, expert) * OPTIMIZER_BYTES
    # FP32 weights are their own master weights.
    own_master = 0 if value_bytes == FP32_BYTES else FP32_BYTES
    return weights * (value_bytes + own_master + 2 * FP32_BYTES)


def _layer_values(model: ModelConfig, layer: int, recompute: str | None) -> int:
    if recompute == "full":
        return model.hidden_size
    queries, keys = _attention_widths(model)
    # Selective recomputation drops the values whose number grows with the square of the sequence length.
    scores = 0 if recompute == "selective" else 2 * model.num_attention_heads * model.seq_length
    attention = 2 * model.hidden_size + 2 * queries + 2 * keys + scores
    return attention + 2 * model.hidden_size + _mlp_values(model, layer)


def _attention_widths(model: ModelConfig) -> tuple[int, int]:
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        width = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
        return width, (width + heads * model.v_head_dim) // 2
    channels = head_channels(model)
    return heads * channels, (model.num_query_groups or heads) * channels


def _mlp_values(model: ModelConfig, layer: int) -> int:
    def kept(width: int) -> int:
        return model.hidden_size + (3 if model.gated_linear_unit else 2) * width

    if not is_moe_layer(model, layer):
        return kept(model.ffn_hidden_size)
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size
    shared = model.moe_shared_expert_intermediate_size
    routed = model.moe_router_topk * (kept(width) + model.hidden_size)
    return routed + (kept(shared) if shared else 0) + 3 * (model.num_moe_experts or 0)

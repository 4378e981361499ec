"""Builds the model chunks of a rank, wrapped for mixed precision and data parallelism."""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoESubmodules, RouterBuilder
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_ft.config.job import JobConfig, PrecisionConfig
from megatron_ft.mcore import versions
from megatron_ft.mcore.model.fp8_layers import add_histories, use_fp8
from megatron_ft.mcore.model.latent_attention import use_latent_attention
from megatron_ft.mcore.model.transformer_config import initialize_weights
from megatron_ft.mcore.moe.replica_layer import MixtureLayer, ReplicaMixtureLayer, Replicas
from megatron_ft.mcore.moe.router import PaddingAwareRouter


class _ReleasableDataParallel(DistributedDataParallel):
    """Megatron's ``DistributedDataParallel`` with gradient hooks that do not keep the model chunk in memory.

    Autograd stores hooks where Python's garbage collector does not find them. Megatron's hooks reference the whole
    chunk, so the chunk, its buffers and its process groups would never be freed. The hooks of this class use weak
    references.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        chunk, parameter = weakref.ref(self), weakref.ref(param)

        def hook(*unused: object) -> None:
            DistributedDataParallel._make_backward_post_hook(chunk(), parameter())(*unused)

        return hook


def forget_iteration(model_chunks: list[torch.nn.Module]) -> None:
    """Set ``model_chunks`` to training mode after a failure. Reset the state of gradient reduction. Keep gradients."""
    for chunk in model_chunks:
        chunk.train()
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):  # type: ignore[misc]
            group.grad_reduce_handle = group.param_gather_handle = None
            group.param_gather_dispatched = False
            group.is_last_microbatch = True
            # Reset to the state after a build, because other ranks may have just built their model, and all ranks must
            # reduce buckets in the same order. In the first iteration after a build, Megatron uses a fixed order and
            # learns when the gradients of a bucket are complete; later, it reduces a bucket when they are.
            group.is_first_batch = True
            group.per_param_grad_ready_counts = {}
            group.golden_per_param_grad_ready_counts = {}
            # From 0.18, a bucket group reduces gradients only once until its buffers are set to zero.
            group.grad_reduce_finished = False


def forget_shards(model_chunks: list[torch.nn.Module]) -> None:
    """Make the gradient buffers of ``model_chunks`` use the shards of this process's current data-parallel rank. The
    current groups must have as many ranks as the groups with which the buffers were made."""
    for chunk in model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):  # type: ignore[misc]
            if group.ddp_config.use_distributed_optimizer:
                rank = group.intra_distributed_optimizer_instance_group.rank()
                group.intra_distributed_optimizer_instance_rank = rank
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
            group.cached_grad_buffer_shard_list = [None] * len(group.buckets)


@contextmanager
def gradients_put_away(model_chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Free the memory of all gradient buffers during the block. After the block, all gradients are zero."""
    buffers = [b.grad_data for c in model_chunks for b in (*c.buffers, *c.expert_parallel_buffers)]  # type: ignore[misc]
    sizes = [buffer.untyped_storage().nbytes() for buffer in buffers]
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)
    yield
    for buffer, size in zip(buffers, sizes, strict=True):
        buffer.untyped_storage().resize_(size)
        buffer.zero_()


def release_caches() -> None:
    """Empty the caches of Megatron's rotary embeddings, because their entries keep modules and process groups alive."""
    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()


class _SequenceParallelNorm:
    """Creates a torch LayerNorm or RMSNorm, as configured. It is a class because a layer spec needs a class.

    With sequence parallelism, the parameters are marked ``sequence_parallel``, so that Megatron sums their gradients
    over the tensor-parallel ranks.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _build_block_spec(
    config: TransformerConfig,
    transformer_impl: str,
    *,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    replicas: Replicas | None,
    router: RouterBuilder,
    precision: PrecisionConfig,
    device: torch.device,
) -> TransformerBlockSubmodules:
    """Return the layer specs of one model chunk of this rank. ``vp_stage`` is the virtual pipeline stage of the chunk,
    or None. If ``replicas`` is None, Megatron assigns experts to ranks. ``router`` creates the routers."""
    local = transformer_impl == "local"
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=not local,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pg_collection.pp.rank(),
    )
    # Megatron uses one spec object for all layers. Layers differ in their experts, so each needs its own object.
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pg_collection.pp.rank())
    for layer_number, layer in enumerate(block.layer_specs, offset + 1):
        if local:
            _use_own_norms(layer.submodules)
            if precision.fp8 is not None:
                use_fp8(layer.submodules, precision, device)
            if isinstance(config, MLATransformerConfig):
                use_latent_attention(layer.submodules)
        mlp = versions.submodules_of(layer.submodules.mlp)
        if isinstance(mlp, MoESubmodules):
            mlp.router = router
            _use_own_mixture(layer.submodules, layer_number, pg_collection, replicas)
    if local:
        block.layer_norm = _SequenceParallelNorm
    return block


def _use_own_norms(submodules: Any) -> None:
    attention = submodules.self_attention.submodules
    for owner, name in (
        (submodules, "input_layernorm"),
        (submodules, "pre_mlp_layernorm"),
        (attention, "q_layernorm"),
        (attention, "k_layernorm"),
        (attention, "kv_layernorm"),
    ):
        if getattr(owner, name, None) not in (None, IdentityOp):
            setattr(owner, name, _SequenceParallelNorm)


def _use_own_mixture(
    submodules: Any, layer_number: int, pg_collection: ProcessGroupCollection, replicas: Replicas | None
) -> None:
    if replicas is None:
        versions.use_mlp_class(submodules, MixtureLayer, pg_collection, {})
    else:
        placement = {"slots": replicas.slots_of(layer_number), "backend": replicas.backend}
        versions.use_mlp_class(submodules, ReplicaMixtureLayer, pg_collection, placement)


def build_model(
    config: JobConfig,
    transformer_config: TransformerConfig,
    *,
    vocab_size: int,
    device: torch.device,
    pg_collection: ProcessGroupCollection,
    replicas: Replicas | None = None,
    router: RouterBuilder = PaddingAwareRouter,
) -> list[torch.nn.Module]:
    """Build the model chunks of this rank, each wrapped in ``DistributedDataParallel``. Return them in the order of
    their virtual pipeline stages.

    Args:
        vocab_size: size of the vocabulary after padding.
        replicas: experts of each rank of the pipeline stage; None if Megatron assigns experts to ranks.
        router: creates the routers of the MoE layers.
    """
    vp_size = config.parallel.virtual_pipeline_model_parallel_size
    stages = [None] if vp_size is None else list(range(vp_size))
    chunks = [
        _build_chunk(config, transformer_config, vocab_size, stage, pg_collection, replicas, router, device)
        for stage in stages
    ]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision.grad_reduce_in_fp32,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        # Pads buckets to multiples of 2**16 elements, so that no rank's part ends inside a block with one scale.
        pad_buckets_for_high_nccl_busbw=config.precision.regime is not None,
        # The commit vote handles gradients that are not finite. Megatron's check would raise an error on one rank only.
        check_for_nan_in_grad=False,
    )
    return [
        _ReleasableDataParallel(
            transformer_config, ddp_config, chunk, disable_bucketing=number > 0, pg_collection=pg_collection
        )
        for number, chunk in enumerate(chunks)
    ]


def build_bare_model(
    config: JobConfig,
    transformer_config: TransformerConfig,
    *,
    vocab_size: int,
    device: torch.device,
    pg_collection: ProcessGroupCollection,
) -> torch.nn.Module:
    """Build the whole model for a job of one rank, without ``DistributedDataParallel`` and its gradient buffers."""
    vocab, groups = vocab_size, pg_collection
    return _build_chunk(config, transformer_config, vocab, None, groups, None, PaddingAwareRouter, device)


def _build_chunk(
    config: JobConfig,
    transformer_config: TransformerConfig,
    vocab_size: int,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    replicas: Replicas | None,
    router: RouterBuilder,
    device: torch.device,
) -> torch.nn.Module:
    model, pp_rank, pp_size = config.model, pg_collection.pp.rank(), pg_collection.pp.size()
    vp_size = config.parallel.virtual_pipeline_model_parallel_size
    chunk = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_build_block_spec(
            transformer_config,
            transformer_config.transformer_impl,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
            replicas=replicas,
            router=router,
            precision=config.precision,
            device=device,
        ),
        vocab_size=vocab_size,
        max_sequence_length=model.max_position_embeddings or model.seq_length,
        pre_process=pp_rank == 0 and vp_stage in (None, 0),
        post_process=pp_rank == pp_size - 1 and (vp_stage is None or vp_stage == (vp_size or 1) - 1),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    initialize_weights(
        chunk,
        model,
        seed=config.training.seed,
        pg_collection=pg_collection,
    )
    _reduce_experts_over_their_holders(chunk, pg_collection)
    _mark_frozen(chunk, config.training.frozen)
    is_half = transformer_config.bf16 or transformer_config.fp16
    built: torch.nn.Module = (Float16Module(transformer_config, chunk) if is_half else chunk).to(device)
    if config.precision.has_histories:
        add_histories(chunk, config.precision, model.num_moe_experts or 0)
    return built


def _mark_frozen(chunk: torch.nn.Module, frozen: str | None) -> None:
    """Mark the parameters that the optimizer must not update, according to ``training.frozen``. They still require
    gradients, so that buffers, checkpoints and windows have the same form as those of any other job."""
    for name, parameter in chunk.named_parameters():
        parameter.is_frozen = frozen is not None and (".experts." in name) == (frozen == "experts")  # type: ignore[attr-defined]


def _reduce_experts_over_their_holders(chunk: torch.nn.Module, pg_collection: ProcessGroupCollection) -> None:
    """Make Megatron sum the gradients of an expert over all ranks that have a copy of it. Without this function,
    Megatron does so only if EP > 1. If EP = 1 and TP > 1, all tensor-parallel ranks have all experts but process
    different tokens, so the copies would diverge."""
    if pg_collection.ep.size() == 1 and pg_collection.tp.size() != pg_collection.expt_tp.size():
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]

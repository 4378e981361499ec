"""Builds the model chunks of this rank, wrapped for precision and data parallelism."""

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import RouterBuilder
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.model.layers import build_block_spec
from megatron_ft.mcore.model.release import ReleasableDataParallel
from megatron_ft.mcore.model.weights import initialize_weights
from megatron_ft.mcore.moe.replicas import Replicas
from megatron_ft.mcore.moe.router import PaddingAwareRouter


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
    """Build the DDP-wrapped chunks of this rank, bottom first (one, or one per virtual stage).

    ``vocab_size`` is the padded size; ``replicas`` are the experts of each rank of the stage, None for Megatron's own
    layout; ``router`` makes the routers of MoE layers.
    """
    vp_size = config.parallel.virtual_pipeline_model_parallel_size
    stages = [None] if vp_size is None else list(range(vp_size))
    chunks = [
        _build_chunk(config, transformer_config, vocab_size, stage, pg_collection, replicas, router).to(device)
        for stage in stages
    ]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision.grad_reduce_in_fp32,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        # The vote answers values that are not finite; this check would raise on one rank in the middle of a reduction.
        check_for_nan_in_grad=False,
    )
    return [
        ReleasableDataParallel(
            transformer_config, ddp_config, chunk, disable_bucketing=number > 0, pg_collection=pg_collection
        )
        for number, chunk in enumerate(chunks)
    ]


def _build_chunk(
    config: JobConfig,
    transformer_config: TransformerConfig,
    vocab_size: int,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    replicas: Replicas | None,
    router: RouterBuilder,
) -> torch.nn.Module:
    model, pp_rank, pp_size = config.model, pg_collection.pp.rank(), pg_collection.pp.size()
    vp_size = config.parallel.virtual_pipeline_model_parallel_size
    chunk = GPTModel(
        config=transformer_config,
        transformer_layer_spec=build_block_spec(
            transformer_config,
            transformer_config.transformer_impl,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
            replicas=replicas,
            router=router,
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
    if transformer_config.bf16 or transformer_config.fp16:
        return Float16Module(transformer_config, chunk)
    return chunk


def _reduce_experts_over_their_holders(chunk: torch.nn.Module, pg_collection: ProcessGroupCollection) -> None:
    """Sum expert gradients over every rank that holds a copy.

    Megatron reduces experts over their own group only when experts are split (EP > 1). With EP=1 and TP > 1 every
    tensor-parallel rank holds all experts and processes other tokens, so the copies would differ.
    """
    if pg_collection.ep.size() == 1 and pg_collection.tp.size() != pg_collection.expt_tp.size():
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]

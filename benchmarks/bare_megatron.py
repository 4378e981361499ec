"""Trains with Megatron-Core by hand, as the reference for equal bits and for overhead. It uses Megatron's own layers
and ``optimizer.step()``; only the samples and, without a GPU, the layer for CPUs come from this project."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.data.batches import Samples

CPU = torch.device("cpu")


class BareLoop:
    """Hand-written Megatron loop over the same model, data and schedule as this project's; fp32 or bf16, TP = PP =
    1."""

    def __init__(
        self,
        config: JobConfig,
        *,
        vocab_size: int,
        samples: Samples,
        pg_collection: ProcessGroupCollection,
        device: torch.device = CPU,
    ) -> None:
        self.job, self.samples, self.pg, self.device = config, samples, pg_collection, device
        self.config = _transformer_config(config)
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, normalization=self.config.normalization
            ),
            vocab_size=vocab_size,
            max_sequence_length=config.model.seq_length,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            pg_collection=pg_collection,
        ).to(device)
        if self.config.bf16:
            model = Float16Module(self.config, model)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=False
        )
        self.model = DistributedDataParallel(self.config, ddp, model, pg_collection=pg_collection)
        self.optimizer, self.scheduler = _optimizer(config, self.model, pg_collection)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = self.model.no_sync
        self.forward_backward = get_forward_backward_func(1, None)

    def copy_weights(self, other: torch.nn.Module) -> None:
        """Copy the weights of ``other``, a DDP-wrapped GPT model of the same shape."""
        self.model.module.load_state_dict(other.module.state_dict())
        self.optimizer.reload_model_params()

    def run_iteration(self, iteration: int) -> tuple[float, float]:
        """Run iteration ``iteration``, counted from 1. Return (mean loss, gradient norm)."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self.forward_backward(
            forward_step_func=_forward_step,
            data_iterator=self._batches(iteration),
            model=[self.model],
            num_microbatches=self._num_microbatches,
            seq_length=self.job.model.seq_length,
            micro_batch_size=self.job.training.micro_batch_size,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=self.job.training.global_batch_size)
        total = torch.stack(reports).sum(dim=0)
        torch.distributed.all_reduce(total, group=self.pg.dp)
        clear_aux_losses_tracker()
        return float(total[0] / total[1]), float(grad_norm)

    @property
    def _num_microbatches(self) -> int:
        training = self.job.training
        return training.global_batch_size // training.micro_batch_size // self.pg.dp.size()

    def _batches(self, iteration: int) -> Iterator[tuple[torch.Tensor, ...]]:
        training, seq_length = self.job.training, self.job.model.seq_length
        positions = torch.arange(seq_length).expand(training.micro_batch_size, -1).contiguous()
        for number in range(self._num_microbatches):
            place = number * self.pg.dp.size() + self.pg.dp.rank()
            first = (iteration - 1) * training.global_batch_size + place * training.micro_batch_size
            rows = [self.samples.sample(index) for index in range(first, first + training.micro_batch_size)]
            tokens = torch.stack([torch.from_numpy(row) for row in rows])
            yield tuple(
                each.contiguous().to(self.device, non_blocking=True)
                for each in (tokens[:, :-1], tokens[:, 1:], positions)
            )


def _forward_step(batches: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens, labels, positions = next(batches)
    return model(tokens, positions, None, labels=labels), partial(_loss, labels.numel())


def _loss(num_tokens: int, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = losses.float().sum()
    tokens = torch.full((), num_tokens, dtype=torch.int32, device=losses.device)
    return total, tokens, torch.stack([total.detach().double(), tokens.double()])


def _dtype(config: JobConfig) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision.params_dtype]


def _transformer_config(config: JobConfig) -> TransformerConfig:
    model, dtype = config.model, _dtype(config)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.layernorm_epsilon,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=model.num_moe_experts,
        moe_layer_freq=[1] * model.num_layers,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_router_topk=model.moe_router_topk,
        moe_router_load_balancing_type=model.moe_router_load_balancing_type,
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_z_loss_coeff=model.moe_z_loss_coeff,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=config.parallel.expert_model_parallel_size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        transformer_impl="local",
        calculate_per_token_loss=True,
        deterministic_mode=True,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def _optimizer(
    config: JobConfig, model: torch.nn.Module, pg_collection: ProcessGroupCollection
) -> tuple[Any, OptimizerParamScheduler]:
    options, batch = config.optimizer, config.training.global_batch_size
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            params_dtype=_dtype(config),
            bf16=_dtype(config) is torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [model],
        use_gloo_process_groups=False,
        pg_collection=pg_collection,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.num_warmup_iterations(config.training.train_iterations) * batch,
        lr_decay_steps=config.training.train_iterations * batch,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    return optimizer, scheduler

"""Builds Megatron's optimizer and learning-rate schedule from the configuration."""

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.model.transformer_config import DTYPES


def build_optimizer(
    config: JobConfig, model_chunks: list[torch.nn.Module], pg_collection: ProcessGroupCollection
) -> MegatronOptimizer:
    """Build AdamW over the chunks' parameters; master weights and moments are sharded if configured."""
    dtype, options, precision = DTYPES[config.precision.params_dtype], config.optimizer, config.precision
    megatron_config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    return get_megatron_optimizer(
        megatron_config, model_chunks, use_gloo_process_groups=False, pg_collection=pg_collection
    )


def build_scheduler(config: JobConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build Megatron's schedule, counted in samples. ``set_position`` sets its position from the iteration."""
    options, batch = config.optimizer, config.training.global_batch_size
    decay = options.num_decay_iterations(config.training.train_iterations)
    wsd: dict[str, Any] = {}
    if options.lr_decay_style == "WSD":
        wsd = {
            "wsd_decay_steps": (options.lr_wsd_decay_iterations or 0) * batch,
            "lr_wsd_decay_style": options.lr_wsd_decay_style,
        }
    return OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.num_warmup_iterations(config.training.train_iterations) * batch,
        lr_decay_steps=decay * batch,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        **wsd,
    )


def set_position(scheduler: OptimizerParamScheduler, consumed_samples: int) -> None:
    """Set learning rate and weight decay for the iteration that follows ``consumed_samples``."""
    # ``step`` adds to the position: from zero, the result does not depend on earlier calls.
    scheduler.num_steps = 0
    scheduler.step(increment=consumed_samples)

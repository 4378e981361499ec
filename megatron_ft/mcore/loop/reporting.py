"""Records of an iteration, made from what the vote told every rank."""

import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.events import ExpertLoad, Metrics, PlacementInForce
from megatron_ft.mcore.loop.engine import IterationResult
from megatron_ft.mcore.loop.placing import Change, PlacementKeeper
from megatron_ft.mcore.model.transformer_config import moe_layer_pattern
from megatron_ft.planning.batch import BatchPlan


def metrics_record(config: JobConfig, result: IterationResult, batch: BatchPlan, seconds: float) -> Metrics:
    """Figures of one iteration that took ``seconds``; names and units are in ``telemetry/metrics.py``."""
    vote, model = result.vote, config.model
    values = {
        "loss": vote.loss,
        "grad_norm": vote.grad_norm,
        "clip_coefficient": vote.clip_coefficient,
        "learning_rate": result.learning_rate,
        "loss_scale": vote.loss_scale,
        "tokens": vote.num_tokens,
        "consumed_samples": vote.iteration * batch.global_batch_size,
        "iteration_seconds": seconds,
        "tokens_per_second": vote.num_tokens / seconds,
        "num_microbatches": batch.num_microbatches,
        "num_padding_microbatches": batch.num_padding_microbatches,
    }
    if model.num_moe_experts:
        values["aux_loss"] = vote.aux_loss * model.moe_aux_loss_coeff
        values["z_loss"] = vote.z_loss * (model.moe_z_loss_coeff or 0.0)
    return Metrics(iteration=vote.iteration, values=values)


def expert_load_record(config: JobConfig, iteration: int, load: torch.Tensor) -> ExpertLoad:
    """Tokens per expert of the mixture layers, from ``load`` [num_layers, num_moe_experts] int64."""
    layer_numbers = tuple(number for number, mixture in enumerate(moe_layer_pattern(config.model), 1) if mixture)
    rows = tuple(tuple(load[number - 1].tolist()) for number in layer_numbers)
    return ExpertLoad(iteration=iteration, layers=rows, layer_numbers=layer_numbers)


def placement_record(
    iteration: int, placement: PlacementKeeper, reason: str, change: Change | None, seconds: float
) -> PlacementInForce:
    """The placement that holds from ``iteration`` on."""
    summaries = tuple(plan.summary() for plan in placement.plans)
    if change is None:
        return PlacementInForce(iteration=iteration, reason=reason, stages=summaries)
    return PlacementInForce(
        iteration=iteration,
        reason=reason,
        stages=summaries,
        moved_bytes=change.moved_bytes,
        gain=change.gain,
        imbalance_before=change.imbalance_before,
        imbalance_after=change.imbalance_after,
        seconds=seconds,
    )

"""Counts the floating-point operations of an iteration, and lists the peak rates of GPUs, for TFLOP/s and MFU.

The count equals that of ``num_floating_point_operations`` in ``megatron/training/training.py`` of Megatron-LM
core_v0.16.1, plus routers and the gates of shared experts. It is the *model's* work (PaLM, arXiv:2204.02311, appendix
B): only matrix products count, causal attention counts as half of full attention, and recomputation, padding and the
update do not count. A product of [m, k] and [k, n] has 2 * m * k * n operations; the backward pass has twice as many as
the forward pass, so each weight of a product costs 6 operations per token::

    attention    6 * (h * (q + 2 * kv) + q * h)                       q, kv: width of all query or all key heads
    latent       6 * (h * ql + ql * a * qk  or  h * a * qk,           ql, kl: ranks of the low-rank projections
                      + h * (kl + p) + kl * a * (n + v) + a * v * h)  a heads of widths qk = n + p, and v
    scores       6 * s * (q + q) / 2,  latent 6 * s * a * (qk + v) / 2
    MLP          6 * h * f * (3 if gated else 2)                      for each of top-k experts, and shared experts
    gates        6 * h * (experts + 1 with a gate of the shared expert)
    head         6 * h * vocabulary                                   with padding
"""

import re
from dataclasses import dataclass, fields

from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import ModelConfig, PrecisionConfig
from megatron_ft.operators import head_channels, is_moe_layer

_PER_WEIGHT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Floating-point operations of the forward and backward pass for one token, over all layers."""

    attention: int
    """Operations of the projections of queries, keys and values, and of the output projection."""
    scores: int
    """Half of the operations of queries times keys and of attention weights times values (causal attention)."""
    dense_mlp: int
    experts: int
    """Operations of the ``moe_router_topk`` experts of each MoE layer, including those of dropped tokens."""
    shared_experts: int
    gates: int
    """Operations of routers and of the gates of shared experts. Megatron-LM does not count them."""
    head: int

    @classmethod
    def of(cls, model: ModelConfig, vocab_size: int) -> "TokenFlops":
        """Count the operations for one token if all parameters are trained. ``vocab_size`` includes padding."""
        num_moe = sum(is_moe_layer(model, layer) for layer in range(1, model.num_layers + 1))
        hidden, shared = model.hidden_size, model.moe_shared_expert_intermediate_size
        attention, scores = _latent_attention(model) if model.multi_latent_attention else _attention(model)
        expert = _mlp(model, model.moe_ffn_hidden_size or model.ffn_hidden_size)
        gates = hidden * (model.num_moe_experts or 0) + (hidden if shared and model.moe_shared_expert_gate else 0)
        return cls(
            attention=_PER_WEIGHT * model.num_layers * attention,
            scores=_PER_WEIGHT * model.num_layers * scores * model.seq_length // 2,
            dense_mlp=_PER_WEIGHT * (model.num_layers - num_moe) * _mlp(model, model.ffn_hidden_size),
            experts=_PER_WEIGHT * num_moe * model.moe_router_topk * expert,
            shared_experts=_PER_WEIGHT * num_moe * (_mlp(model, shared) if shared else 0),
            gates=_PER_WEIGHT * num_moe * gates,
            head=_PER_WEIGHT * hidden * vocab_size,
        )

    @property
    def total(self) -> int:
        """Return the number of operations for one token."""
        return sum(getattr(self, field.name) for field in fields(self))


def _attention(model: ModelConfig) -> tuple[int, int]:
    """Return two counts: weights of the attention projections, and multiplications for one pair of query and key."""
    channels = head_channels(model)
    queries = model.num_attention_heads * channels
    keys = (model.num_query_groups or model.num_attention_heads) * channels
    return model.hidden_size * (queries + 2 * keys) + queries * model.hidden_size, 2 * queries


def _latent_attention(model: ModelConfig) -> tuple[int, int]:
    hidden, heads, rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    queries = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    weights = hidden * queries if rank is None else hidden * rank + rank * queries
    weights += hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
    weights += model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
    weights += heads * model.v_head_dim * hidden
    return weights, queries + heads * model.v_head_dim


def _mlp(model: ModelConfig, width: int) -> int:
    return model.hidden_size * width * (3 if model.gated_linear_unit else 2)


PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"B200", {"fp8": 4500.0, "bf16": 2250.0, "fp16": 2250.0, "fp32": 75.0}),
    (r"H100 PCIe", {"fp8": 1513.0, "bf16": 756.0, "fp16": 756.0, "fp32": 51.0}),
    (r"H100 NVL", {"fp8": 1671.0, "bf16": 835.5, "fp16": 835.5, "fp32": 60.0}),
    (r"H100 80GB HBM3|H200(?! NVL)|GH200", {"fp8": 1979.0, "bf16": 989.4, "fp16": 989.4, "fp32": 66.9}),
    (r"A100", {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}),
    (r"L40S", {"fp8": 733.0, "bf16": 362.0, "fp16": 362.0, "fp32": 91.6}),
    (r"V100-SXM2", {"fp16": 125.0, "fp32": 15.7}),
)
"""Peak rates in TFLOP/s by number format, from NVIDIA's data sheets, with a regular expression for GPU names. The rates
are without sparsity. FP32 rates are without TF32, because PyTorch does not use TF32 by default."""


def peak_tflops(given: float | None, device_name: str | None, precision: PrecisionConfig) -> float | None:
    """Return the peak rate of a GPU in TFLOP/s, or None if it is unknown.

    Args:
        given: ``telemetry.peak_tflops``, which has precedence.
        device_name: name of the GPU as CUDA reports it; None on CPUs.
    """
    if given is not None:
        return given
    number_format = "fp8" if precision.fp8 else precision.params_dtype
    rates = (rates for pattern, rates in PEAK_TFLOPS if device_name and re.search(pattern, device_name))
    return next(rates, {}).get(number_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Computes throughput figures (tokens/s, TFLOP/s, MFU) of an iteration from its duration."""

    flops_per_sample: int
    peak_tflops: float | None
    """Peak rate of a GPU in TFLOP/s; None if it is unknown."""
    ranks_per_gpu: int = 1

    @classmethod
    def of(cls, config: JobConfig, vocab_size: int, device_name: str | None) -> "Throughput":
        """Create the ``Throughput`` of a job. ``vocab_size`` includes padding; ``device_name`` is None on CPUs."""
        return cls(
            flops_per_sample=TokenFlops.of(config.model, vocab_size).total * config.model.seq_length,
            peak_tflops=peak_tflops(config.telemetry.peak_tflops, device_name, config.precision),
            ranks_per_gpu=1 if device_name is None else config.launch.ranks_per_gpu,
        )

    def figures(self, num_samples: int, num_tokens: int, seconds: float, *, world_size: int) -> dict[str, float]:
        """Return the metrics of an iteration with ``num_samples`` samples. ``num_tokens`` is the number of their tokens
        that count in the loss. On CPUs, each rank counts as a GPU. If the peak rate is unknown, ``mfu`` is left out."""
        num_gpus = world_size / self.ranks_per_gpu
        rate = self.flops_per_sample * num_samples / seconds / num_gpus / 1e12
        found = {"tokens_per_second_per_gpu": num_tokens / seconds / num_gpus, "tflops_per_gpu": rate}
        return found if self.peak_tflops is None else {**found, "mfu": rate / self.peak_tflops}

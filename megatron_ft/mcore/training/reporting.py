"""Makes the events about a run's start and its iterations. Measures compute time, and counts operations for MFU."""

import hashlib
import importlib.metadata
import json
import re
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import ModelConfig, PrecisionConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.events import (
    Evaluation,
    ExpertLoad,
    Metrics,
    PipelineIdle,
    PlacementInForce,
    ProfileRecorded,
    Record,
    RunStarted,
    SnapshotPlanned,
)
from megatron_ft.mcore.model.transformer_config import moe_layer_pattern, unwrap
from megatron_ft.mcore.moe.placement_manager import Change, PlacementManager
from megatron_ft.mcore.state.train_state import IterationResult
from megatron_ft.operators import StateShard, head_channels, is_moe_layer
from megatron_ft.planning.iteration import BatchPlan, Slowest
from megatron_ft.planning.snapshot.plan import WindowPlan, window_bytes
from megatron_ft.topology import Topology

_PER_WEIGHT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Floating-point operations of the forward and backward pass for one token, over all layers.

    The count equals that of ``num_floating_point_operations`` in ``megatron/training/training.py`` of Megatron-LM
    core_v0.16.1, plus routers and the gates of shared experts. It is the *model's* work (PaLM, arXiv:2204.02311,
    appendix B): only matrix products count, causal attention counts as half of full attention, and recomputation,
    padding and the update do not count. A product of [m, k] and [k, n] has 2 * m * k * n operations; the backward pass
    has twice as many as the forward pass, so each weight of a product costs 6 operations per token::

        attention    6 * (h * (q + 2 * kv) + q * h)                       q, kv: width of all query or all key heads
        latent       6 * (h * ql + ql * a * qk  or  h * a * qk,           ql, kl: ranks of the low-rank projections
                          + h * (kl + p) + kl * a * (n + v) + a * v * h)  a heads of widths qk = n + p, and v
        scores       6 * s * (q + q) / 2,  latent 6 * s * a * (qk + v) / 2
        MLP          6 * h * f * (3 if gated else 2)                      for each of top-k experts, and shared experts
        gates        6 * h * (experts + 1 with a gate of the shared expert)
        head         6 * h * vocabulary                                   with padding
    """

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


class Evaluates(Protocol):
    """Interface of an engine that can evaluate its weights."""

    iteration: int

    def evaluate(self) -> tuple[float, int]:
        """Evaluate the weights on validation data. Return the mean loss per token and the number of tokens."""


_PACKAGES = ("torch", "megatron-core", "numpy")


def _config_digest(config: JobConfig) -> str:
    """Return a checksum of the job's configuration."""
    content = json.dumps(to_dict(config), sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def device_name(device: torch.device) -> str | None:
    """Return the name of a GPU as CUDA reports it; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def memory_use(device: torch.device) -> dict[str, int]:
    """Return the bytes of memory that this rank uses on its GPU (without GPU: on the host), by field of ``Ballot``."""
    if device.type == "cuda":
        return {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "peak_bytes": torch.cuda.max_memory_allocated(device),
        }
    resident = psutil.Process().memory_info().rss
    # Linux and macOS report the peak in different units. The peak must not be below the present memory.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"allocated_bytes": resident, "peak_bytes": max(resident, peak)}


def planned_record(
    iteration: int,
    plan: WindowPlan,
    shards_by_rank: Sequence[tuple[StateShard, ...]],
    host_bytes: int,
    cause: str,
) -> SnapshotPlanned:
    """Return the event about the sizes of windows of ``plan``, which applies after ``iteration``. ``host_bytes`` is the
    host memory in bytes for windows and copies, on the node that needs most. ``cause`` states why the plan was made
    again; it is empty for a first plan."""
    return SnapshotPlanned(
        iteration=iteration,
        window_iterations=plan.num_iterations,
        interval_iterations=plan.interval_iterations,
        window_bytes=max(window_bytes(plan, shards) for shards in shards_by_rank),
        dense_bytes=max(window_bytes(WindowPlan.dense(shards), shards) for shards in shards_by_rank),
        host_bytes=host_bytes,
        reason=plan.reason,
        captured_bytes=None if plan.partial is None else plan.partial.captured_bytes,
        cause=cause,
    )


def run_started(
    config: JobConfig,
    context: RankContext,
    device: torch.device,
    resumed: tuple[str, int] | None,
    throughput: Throughput,
) -> RunStarted:
    """Return the event of a run's start. ``resumed`` is (name, iteration) of the checkpoint or window from which the
    run continues; None for a new run."""
    return RunStarted(
        run_name=context.run_dir.name,
        run_dir=str(context.run_dir),
        model=config.model.name,
        world_size=context.world_size,
        num_nodes=context.num_nodes,
        train_iterations=config.training.train_iterations,
        device="cpu" if (name := device_name(device)) is None else f"cuda: {name}",
        versions={name: importlib.metadata.version(name) for name in _PACKAGES},
        config_digest=_config_digest(config),
        peak_tflops=throughput.peak_tflops,
        resumed_from=None if resumed is None else resumed[0],
        resumed_from_iteration=None if resumed is None else resumed[1],
    )


def evaluation_record(engine: Evaluates) -> Evaluation:
    """Evaluate the weights of ``engine``, and return the event with the result. All ranks must call this."""
    began = time.perf_counter()
    loss, num_tokens = engine.evaluate()
    seconds = time.perf_counter() - began
    # ``math.exp`` would raise an error for a loss whose perplexity is too large for a float.
    perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())
    return Evaluation(
        iteration=engine.iteration, loss=loss, perplexity=perplexity, num_tokens=num_tokens, seconds=seconds
    )


def iteration_records(
    config: JobConfig,
    result: IterationResult,
    batch: BatchPlan,
    seconds: float,
    nodes: Sequence[int],
    throughput: Throughput,
) -> Iterator[Metrics | PipelineIdle]:
    """Yield the events about one iteration, which took ``seconds``: its metrics (see ``telemetry/metrics.py``), and, if
    measured, the time that each pipeline stage waited for messages.

    Args:
        nodes: node number of each rank.
        throughput: computes the rate of floating-point operations from the duration of the iteration.
    """
    vote, model = result.vote, config.model
    values = {
        "loss": vote.loss,
        "grad_norm": vote.grad_norm,
        "clip_coefficient": vote.clip_coefficient,
        "learning_rate": result.learning_rate,
        "loss_scale": vote.loss_scale,
        "tokens": vote.num_tokens,
        "consumed_samples": batch.samples_before(vote.iteration + 1),
        "global_batch_size": batch.global_batch_size,
        "iteration_seconds": seconds,
        "tokens_per_second": vote.num_tokens / seconds,
        **throughput.figures(batch.global_batch_size, vote.num_tokens, seconds, world_size=len(nodes)),
        "num_microbatches": batch.num_microbatches,
        "num_padding_microbatches": batch.num_padding_microbatches,
    }
    if model.num_moe_experts:
        values["aux_loss"] = vote.aux_loss * model.moe_aux_loss_coeff
        values["z_loss"] = vote.z_loss * (model.moe_z_loss_coeff or 0.0)
    if (last := Slowest.of(result.of_ranks.pass_seconds)) is not None:
        values["slowest_rank"], values["slowest_node"] = last.rank, nodes[last.rank]
        values["slowest_rank_over_median"] = last.over_median
    if (memory := result.of_ranks.memory) is not None and memory.peak_bytes:
        values["memory_allocated_bytes"] = memory.allocated_bytes
        if memory.reserved_bytes:
            values["memory_reserved_bytes"] = memory.reserved_bytes
        values["memory_peak_bytes"], values["memory_peak_rank"] = memory.peak_bytes, memory.peak_rank
    yield Metrics(iteration=vote.iteration, values=values)
    idle_seconds = result.of_ranks.idle_seconds
    if any(idle_seconds):
        yield idle_record(vote.iteration, idle_seconds, Topology.of(config.parallel, len(nodes)))


def idle_record(iteration: int, idle_seconds: Sequence[float], topology: Topology) -> PipelineIdle:
    """Return the event about each pipeline stage's wait for messages. ``idle_seconds``: this time for each rank."""
    stages: list[list[float]] = [[] for _ in range(topology.pipeline_model_parallel_size)]
    for rank, seconds in enumerate(idle_seconds):
        stages[topology.coordinates(rank).pp].append(seconds)
    return PipelineIdle(iteration=iteration, seconds=tuple(map(statistics.fmean, stages)))


def expert_load_record(config: JobConfig, iteration: int, load: torch.Tensor) -> ExpertLoad:
    """Return the event about the number of tokens of each expert. ``load`` is int64 [num_layers, num_moe_experts]."""
    layer_numbers = tuple(number for number, mixture in enumerate(moe_layer_pattern(config.model), 1) if mixture)
    rows = tuple(tuple(load[number - 1].tolist()) for number in layer_numbers)
    return ExpertLoad(iteration=iteration, layers=rows, layer_numbers=layer_numbers)


def placement_record(
    iteration: int, placement: PlacementManager, reason: str, change: Change | None, seconds: float
) -> PlacementInForce:
    """Return the event about the placement that applies from ``iteration`` on. ``change`` describes the migration to
    this placement, which took ``seconds``; None without a migration."""
    plans = placement.plans
    replicas = [count for plan in plans for layer in range(len(plan.slots)) for count in plan.replica_counts(layer)]
    in_force = PlacementInForce(
        iteration=iteration,
        reason=reason,
        stages=tuple(plan.summary() for plan in plans),
        single_loss_survival=placement.single_loss_survival,
        fewest_replicas=min(replicas, default=None),
        mean_replicas=sum(replicas) / len(replicas) if replicas else None,
        most_replicas=max(replicas, default=None),
    )
    if change is None:
        return in_force
    return replace(
        in_force,
        moved_bytes=change.moved_bytes,
        gain=change.gain,
        imbalance_before=change.imbalance_before,
        imbalance_after=change.imbalance_after,
        seconds=seconds,
    )


NUM_ITERATIONS = 16
"""Largest number of iterations over which ``StragglerTimer`` computes a median. It uses the newest ones."""
MIN_ITERATIONS = 8
"""Number of iterations that ``StragglerTimer`` needs for a median. The first iterations of a process are slow, by
different amounts on different ranks."""


class _Clock(Protocol):
    """Interface of a clock that marks points in time, and measures the time between two marks."""

    def mark(self) -> Any:
        """Return a mark of the current time."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Return the seconds between two marks."""


class _WallClock:
    """Measures wall-clock time for layers on a CPU, which are finished when their call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        return ended - began


class _StreamClock:
    """Measures time on the GPU's current stream with CUDA events. Only ``seconds`` waits for the GPU."""

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """Return the seconds between two events. Wait until the stream has passed both."""
        ended.synchronize()  # type: ignore[no-untyped-call]
        return began.elapsed_time(ended) / 1e3  # type: ignore[no-untyped-call, no-any-return]


# The time of a whole iteration cannot show which rank is slow, because all ranks wait for the slowest one. So the timer
# measures only the core attention of a rank's first layer. Its shapes do not depend on the routing of tokens, and
# without context parallelism it contains no communication.
class StragglerTimer:
    """Measures how long forward passes of one layer take on this rank, to find ranks that compute slowly."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._began: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._iterations: deque[float] = deque(maxlen=NUM_ITERATIONS)

    @classmethod
    def on(cls, device: torch.device) -> "StragglerTimer":
        """Create a timer with the clock for ``device``."""
        return cls(_StreamClock() if device.type == "cuda" else _WallClock())

    def watch(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        """Measure the first layer of these model chunks from now on. Earlier measurements still count. With context
        parallelism, measure nothing, because attention then waits for other ranks."""
        self.forget()
        layers = [layer for chunk in model_chunks for layer in unwrap(chunk).decoder.layers]  # type: ignore[union-attr, operator]
        if layers and layers[0].config.context_parallel_size == 1:
            self.time(layers[0].self_attention.core_attention)

    def forget(self) -> None:
        """Drop the measurements of an iteration that failed."""
        self._began, self._passes = None, []

    def time(self, module: torch.nn.Module) -> None:
        """Measure the forward passes of ``module`` in training mode."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def end_iteration(self) -> float:
        """Return the typical duration of a forward pass in seconds: the median of the medians of the newest iterations.
        Return 0.0 if there are too few iterations. An iteration without a forward pass does not count."""
        # Reading the marks does not wait: the caller has read the gradient norm, so the stream has passed all marks.
        passes, self._passes = self._passes, []
        if passes:
            self._iterations.append(statistics.median(self._clock.seconds(*marks) for marks in passes))
        return statistics.median(self._iterations) if len(self._iterations) >= MIN_ITERATIONS else 0.0

    def _begin(self, module: torch.nn.Module, inputs: Any) -> None:
        self._began = self._clock.mark() if module.training else None

    def _end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._began is not None:
            self._passes.append((self._began, self._clock.mark()))
            self._began = None


class ProfilerWindow:
    """Records some iterations of this process with ``torch.profiler``, and writes a trace file.

    A process that enters a new membership during these iterations records its later iterations to another file. A
    failure to write the file does not stop training; the event about the trace contains the error.
    """

    def __init__(self, telemetry: TelemetryConfig, run_dir: Path, report: Callable[[Record], None]) -> None:
        """Prepare to record the iterations that ``telemetry`` defines. Record nothing if ``profile_first_iteration`` is
        null. ``report`` sends an event from this rank."""
        first = telemetry.profile_first_iteration
        self._window = range(0) if first is None else range(first, first + telemetry.profile_iterations)
        self._ranks = frozenset(telemetry.profile_ranks)
        self._folder = run_dir / "profiles" if telemetry.profile_dir is None else Path(telemetry.profile_dir)
        self._report = report
        self._profiler: torch.profiler.profile | None = None
        self._recorded = (0, 0)
        self._name = (0, 0)

    def begin(self, iteration: int, *, rank: int, generation: int) -> None:
        """Start or continue to record if ``iteration`` must be recorded and ``rank`` is one of ``profile_ranks``."""
        if iteration not in self._window or rank not in self._ranks:
            return
        if self._profiler is None:
            # By default, all activities are recorded: on the CPU, and on CUDA if there is a GPU.
            self._profiler = torch.profiler.profile()  # type: ignore[no-untyped-call]
            self._profiler.start()
            self._recorded, self._name = (iteration, iteration), (rank, generation)
        self._recorded = (self._recorded[0], iteration)

    def end(self, iteration: int) -> None:
        """Write the trace if ``iteration`` is the last one to record."""
        if iteration + 1 not in self._window:
            self.stop()

    def stop(self) -> None:
        """Write the trace of what was recorded so far. Do nothing if nothing is being recorded."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        (first, last), (rank, generation) = self._recorded, self._name
        path, error = self._folder / f"rank-{rank:05d}-generation-{generation}-iteration-{first:07d}.json", None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as failure:  # Kineto raises RuntimeError if it cannot write
            error = f"{type(failure).__name__}: {failure}"
        record = ProfileRecorded(rank=rank, first_iteration=first, last_iteration=last, path=str(path), error=error)
        self._report(record)

"""Records of a run's start and its iterations; the compute time of a rank without waiting."""

import hashlib
import importlib.metadata
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.events import ExpertLoad, Metrics, PlacementInForce, RunStarted, SnapshotPlanned
from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.model.transformer_config import moe_layer_pattern
from megatron_ft.mcore.moe.placement_manager import Change, PlacementManager
from megatron_ft.mcore.training.iteration import IterationResult
from megatron_ft.operator_state import StateShard
from megatron_ft.planning.alerts import slowest
from megatron_ft.planning.batch import BatchPlan
from megatron_ft.planning.snapshot.pieces import window_bytes
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.planning.snapshot.report import dense_plan

_PACKAGES = ("torch", "megatron-core", "numpy")


def config_digest(config: JobConfig) -> str:
    """Checksum of the job's configuration."""
    content = json.dumps(to_dict(config), sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def planned_record(
    iteration: int, plan: WindowPlan, shards_by_rank: Sequence[tuple[StateShard, ...]], host_bytes: int
) -> SnapshotPlanned:
    """Return the event with the sizes of windows of ``plan``, in force after ``iteration``."""
    return SnapshotPlanned(
        iteration=iteration,
        window_iterations=plan.num_iterations,
        interval_iterations=plan.interval_iterations,
        window_bytes=max(window_bytes(plan, shards) for shards in shards_by_rank),
        dense_bytes=max(window_bytes(dense_plan(shards), shards) for shards in shards_by_rank),
        host_bytes=host_bytes,
        reason=plan.reason,
    )


def run_started(
    config: JobConfig, context: RankContext, device: torch.device, resumed: tuple[str, int] | None
) -> RunStarted:
    """Return the event of a run's start; ``resumed`` is its source and the last iteration in that."""
    return RunStarted(
        run_name=context.run_dir.name,
        model=config.model.name,
        world_size=context.world_size,
        num_nodes=context.num_nodes,
        train_iterations=config.training.train_iterations,
        device=f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu",
        versions={name: importlib.metadata.version(name) for name in _PACKAGES},
        config_digest=config_digest(config),
        resumed_from=None if resumed is None else resumed[0],
        resumed_from_iteration=None if resumed is None else resumed[1],
    )


def metrics_record(
    config: JobConfig, result: IterationResult, batch: BatchPlan, seconds: float, nodes: Sequence[int]
) -> Metrics:
    """Return the figures of one iteration that took ``seconds``; names and units are in ``telemetry/metrics.py``.

    Args:
        nodes: nodes of the ranks, in order.
    """
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
    if (last := slowest(result.pass_seconds)) is not None:
        values["slowest_rank"], values["slowest_node"] = last.rank, nodes[last.rank]
        values["slowest_rank_over_median"] = last.over_median
    return Metrics(iteration=vote.iteration, values=values)


def expert_load_record(config: JobConfig, iteration: int, load: torch.Tensor) -> ExpertLoad:
    """Return the tokens per expert of the MoE layers, from ``load`` [num_layers, num_moe_experts] int64."""
    layer_numbers = tuple(number for number, mixture in enumerate(moe_layer_pattern(config.model), 1) if mixture)
    rows = tuple(tuple(load[number - 1].tolist()) for number in layer_numbers)
    return ExpertLoad(iteration=iteration, layers=rows, layer_numbers=layer_numbers)


def placement_record(
    iteration: int, placement: PlacementManager, reason: str, change: Change | None, seconds: float
) -> PlacementInForce:
    """Return the event of the placement in force from ``iteration`` on."""
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
"""Number of newest iterations in the median."""
MIN_ITERATIONS = 8
"""Smallest number of iterations for a median: the first ones of a process are slow, differently on each rank."""


class Clock(Protocol):
    """Records times and measures the time between two of them."""

    def mark(self) -> Any:
        """Return the present time."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Return the seconds between two times."""


class WallClock:
    """The wall-clock time of the process: a CPU has finished a layer when its call returns."""

    def mark(self) -> float:
        """Return the present time."""
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        """Return the seconds between two times."""
        return ended - began


class StreamClock:
    """The time of the GPU's current stream; nothing waits until times are read."""

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """Return the seconds between two events; waits until the stream has passed both."""
        ended.synchronize()  # type: ignore[no-untyped-call]
        return began.elapsed_time(ended) / 1e3  # type: ignore[no-untyped-call, no-any-return]


# Timed is the attention of a rank's first layer, between its projections. Its shapes do not depend on where tokens go,
# and where the context is not parallel there is no communication in it. The time of a whole iteration cannot show a
# slow rank: it is the slowest rank's on all of them.
class StragglerTimer:
    """Times forward passes of a rank's training, iteration by iteration, also when its model is rebuilt.

    Args:
        clock: clock for the measurement.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._iterations: deque[float] = deque(maxlen=NUM_ITERATIONS)

    @classmethod
    def on(cls, device: torch.device) -> "StragglerTimer":
        """Make the timer of a rank that computes on ``device``."""
        return cls(StreamClock() if device.type == "cuda" else WallClock())

    def watch(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        """Time this model of the rank from now on, bottom first; measurements of earlier models still count. Nothing is
        timed if attention waits for other ranks."""
        self._began, self._passes = None, []
        layers = [layer for chunk in model_chunks for layer in unwrap(chunk).decoder.layers]  # type: ignore[union-attr, operator]
        if layers and layers[0].config.context_parallel_size == 1:
            self.time(layers[0].self_attention.core_attention)

    def time(self, module: torch.nn.Module) -> None:
        """Time the forward passes of ``module`` while it trains."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def end_iteration(self) -> float:
        """Return the seconds of a forward pass: the median of the newest iterations' medians, or 0.0 if there are too
        few.

        An iteration without a forward pass does not count.
        """
        # Read for the ballot: the gradient norm has made the host wait for the stream, so these marks are passed.
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

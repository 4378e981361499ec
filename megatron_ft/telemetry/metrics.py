"""Lists all metrics of an iteration with name, unit and meaning. No other file lists them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class _Metric:
    """One metric of an iteration."""

    name: str
    """Key in the ``metrics`` record, and name in wandb."""
    unit: str
    """Unit; ``1`` for a number without a unit."""
    meaning: str
    required: bool = False
    """Whether every ``metrics`` record must contain the metric."""
    is_timed: bool = False
    """Whether the metric depends on the clock or the machine. Such a metric differs between two runs even if their
    training is bitwise equal."""


_ALL = (
    _Metric(
        "loss",
        "nats/token",
        "Mean language-model loss over the tokens of all ranks, without auxiliary losses.",
        required=True,
    ),
    _Metric("aux_loss", "1", "Load-balancing loss times its coefficient, mean over MoE layers."),
    _Metric("z_loss", "1", "Router z-loss times its coefficient, mean over MoE layers."),
    _Metric("grad_norm", "1", "Global L2 norm of the gradient before clipping."),
    _Metric("clip_coefficient", "1", "Factor by which clipping multiplied the gradient; 1 if nothing was clipped."),
    _Metric("learning_rate", "1", "Learning rate of this iteration's update."),
    _Metric("loss_scale", "1", "Loss scale of this iteration; 1 outside fp16."),
    _Metric("tokens", "tokens", "Number of tokens in this iteration's loss, over all ranks."),
    _Metric("global_batch_size", "samples", "Samples of this iteration."),
    _Metric("consumed_samples", "samples", "Samples read since the run began, including this iteration."),
    _Metric(
        "iteration_seconds",
        "s",
        "Wall time from the first microbatch to the end of the iteration, without recoveries.",
        is_timed=True,
    ),
    _Metric("tokens_per_second", "tokens/s", "tokens / iteration_seconds, over all ranks.", is_timed=True),
    _Metric("tokens_per_second_per_gpu", "tokens/s", "tokens_per_second per GPU; on CPUs, per rank.", is_timed=True),
    _Metric(
        "tflops_per_gpu",
        "TFLOP/s",
        "Floating-point operations of the model's products (`mcore/training/reporting.py`) per second and GPU, or "
        "rank on CPUs. Recomputation and padding do not count.",
        is_timed=True,
    ),
    _Metric(
        "mfu",
        "1",
        "Model FLOPs utilization: `tflops_per_gpu` divided by the GPU's peak (`telemetry.peak_tflops`).",
        is_timed=True,
    ),
    _Metric(
        "memory_allocated_bytes",
        "bytes",
        "Memory of tensors on the GPU of the rank that has most; on CPUs, resident memory of a rank's process.",
        is_timed=True,
    ),
    _Metric(
        "memory_reserved_bytes",
        "bytes",
        "Memory that PyTorch has reserved on a GPU, of the rank that has most.",
        is_timed=True,
    ),
    _Metric(
        "memory_peak_bytes",
        "bytes",
        "Largest `memory_allocated_bytes` since the processes of the ranks began.",
        is_timed=True,
    ),
    _Metric("memory_peak_rank", "rank", "Rank with `memory_peak_bytes`.", is_timed=True),
    _Metric("num_microbatches", "microbatches", "Microbatches of one pipeline in this iteration, including padding."),
    _Metric(
        "num_padding_microbatches",
        "microbatches",
        "Padding microbatches of all pipelines, added if a batch does not divide evenly. They do not affect loss.",
    ),
    _Metric(
        "slowest_rank",
        "rank",
        "Rank whose first attention layer recently took the longest time. This layer's work is the same on all ranks.",
        is_timed=True,
    ),
    _Metric(
        "slowest_node",
        "node",
        "Node of `slowest_rank`. A node's number never changes; ranks get new numbers when nodes join or leave.",
        is_timed=True,
    ),
    _Metric(
        "slowest_rank_over_median",
        "1",
        "Time of `slowest_rank` divided by the (lower) median time of all ranks; about 1 if no rank is slow.",
        is_timed=True,
    ),
)

METRICS: Mapping[str, _Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Metrics by name."""


def _spread(prefix: str, whose: str) -> tuple[_Metric, ...]:
    return (
        _Metric(
            f"{prefix}p50_over_even",
            "1",
            f"Median load of {whose}. A load is an expert's tokens divided by the mean over its layer's experts.",
        ),
        _Metric(f"{prefix}p95_over_even", "1", f"95th percentile of the load of {whose}."),
        _Metric(f"{prefix}max_over_even", "1", f"Largest load of {whose}."),
    )


_HHI = (
    "Herfindahl-Hirschman index (HHI) times the number E of experts, `E * sum(share_e ** 2)`: 1 for even load, E if "
    "one expert has all tokens"
)

_FROM_EVENTS = (
    _Metric("evaluation_loss", "nats/token", "Mean validation loss per token after this iteration."),
    *_spread("expert_load/layer_<n>_", "the experts of layer n"),
    _Metric("expert_load/layer_<n>_hhi_over_even", "1", f"{_HHI}."),
    *_spread("expert_load/", "the experts of all layers"),
    _Metric("expert_load/hhi_over_even", "1", "HHI times the number of experts (see above), mean over layers."),
    _Metric("replicas/fewest", "copies", "Smallest number of copies of any expert in any layer."),
    _Metric("replicas/mean", "copies", "Mean number of copies of an expert in the current placement."),
    _Metric("replicas/most", "copies", "Largest number of copies of any expert in any layer."),
    _Metric(
        "replicas/single_loss_survival",
        "1",
        "Probability that the job survives the loss of one failure domain, each being equally likely. To "
        "survive, every expert needs a remaining copy, and recovery.min_nodes nodes must remain. Reported "
        "only if recovery.min_nodes is set.",
    ),
    _Metric(
        "snapshot/window_iterations",
        "iterations",
        "Length W of a window: the iterations that together capture every operator once.",
    ),
    _Metric(
        "snapshot/stalled_seconds",
        "s",
        "Time that training on rank 0 has waited for captures, over all attempts.",
    ),
    _Metric("snapshot/captured_bytes", "bytes", "Bytes of state that rank 0 has captured so far."),
    _Metric(
        "snapshot/replicated_bytes",
        "bytes",
        "Bytes that the snapshot server of rank 0 has sent to all peers so far.",
    ),
    _Metric(
        "snapshot/persisted_bytes",
        "bytes",
        "Bytes that the snapshot server of rank 0 has written to storage so far.",
    ),
    _Metric(
        "snapshot/idle_copied_bytes",
        "bytes",
        "Bytes that rank 0 has captured while it waited for messages of another pipeline stage "
        "(`snapshot.copy_in_bubbles`).",
    ),
    _Metric(
        "pipeline/stage_<n>_idle_seconds",
        "s",
        "Time for which pipeline stage n waited for messages of adjacent stages, mean over its ranks. Not measured "
        "with NCCL.",
    ),
    _Metric("upstream_log/rank_bytes", "bytes", "Memory of the upstream log on the rank with the largest log."),
    _Metric("upstream_log/node_bytes", "bytes", "Memory of upstream logs on the node with the largest logs."),
    _Metric(
        "goodput/ettr",
        "1",
        "Effective training time ratio so far: time of useful iterations divided by wall time.",
    ),
    _Metric(
        "goodput/ettr_predicted",
        "1",
        "ETTR that a formula predicts from this run's waiting times, interruptions and recovery times so far.",
    ),
    _Metric(
        "goodput/tokens_per_second",
        "tokens/s",
        "Goodput so far: tokens of useful iterations divided by wall time.",
    ),
    _Metric("goodput/interruptions", "1", "Recoveries, changes of membership, and jobs that continued the run so far."),
    _Metric(
        "recovery/<strategy>_seconds",
        "s",
        "Duration of the recovery before this iteration. The strategy is `living_state`, `localized_replay`, "
        "`rollback`, `checkpoint`, `start_over`, or `unknown` if no record names it.",
    ),
    _Metric(
        "job/attempt",
        "1",
        "Number of times that the ranks of this run have been started, including the current start.",
    ),
    _Metric("job/world_size", "ranks", "Number of ranks that train."),
)

FROM_EVENTS: Mapping[str, _Metric] = MappingProxyType({metric.name: metric for metric in _FROM_EVENTS})
"""Metrics that only experiment trackers such as wandb receive. They are computed from the run's records; ``<n>`` and
``<strategy>`` are placeholders."""


def check_metrics(values: Mapping[str, float]) -> None:
    """Check that ``METRICS`` lists every name in ``values``, and that ``values`` has every required metric.

    Raises:
        ValueError: a metric is not listed, or a required one is missing; the message names it.
    """
    if unknown := [name for name in values if name not in METRICS]:
        raise ValueError(f"metrics.{unknown[0]}: is not listed in megatron_ft/telemetry/metrics.py")
    if missing := [name for name, metric in METRICS.items() if metric.required and name not in values]:
        raise ValueError(f"metrics.{missing[0]}: is required")

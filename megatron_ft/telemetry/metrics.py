"""List of all metrics of an iteration with name, unit and meaning. They are listed nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of a ``metrics`` record."""

    name: str
    """Key in the record and name in wandb."""
    unit: str
    """Unit, or ``1`` for a number without a unit."""
    meaning: str
    required: bool = False
    """Whether every ``metrics`` record has it."""
    is_timed: bool = False
    """Whether it depends on the clock. Such metrics differ between runs that are otherwise equal in every bit."""


_ALL = (
    Metric(
        "loss",
        "nats/token",
        "Mean language-model loss over the tokens of all ranks, without auxiliary losses.",
        required=True,
    ),
    Metric("aux_loss", "1", "Load-balancing loss times its coefficient; mean over MoE layers."),
    Metric("z_loss", "1", "Router z-loss times its coefficient; mean over MoE layers."),
    Metric("grad_norm", "1", "Global L2 norm of the gradient before clipping."),
    Metric("clip_coefficient", "1", "Factor that clipping multiplied the gradient by; 1 without clipping."),
    Metric("learning_rate", "1", "Learning rate of this iteration's update."),
    Metric("loss_scale", "1", "Loss scale of this iteration; 1 outside fp16."),
    Metric("tokens", "tokens", "Tokens of this iteration's loss, over all ranks."),
    Metric("consumed_samples", "samples", "Samples read since the run began, this iteration included."),
    Metric(
        "iteration_seconds", "s", "Wall time of the iteration, from its first microbatch to its end.", is_timed=True
    ),
    Metric("tokens_per_second", "tokens/s", "tokens / iteration_seconds, over all ranks.", is_timed=True),
    Metric("num_microbatches", "microbatches", "Microbatches of one pipeline in this iteration, padding included."),
    Metric(
        "num_padding_microbatches",
        "microbatches",
        "Microbatches of all pipelines that only pad an uneven division; they have no weight in the loss.",
    ),
    Metric(
        "slowest_rank",
        "rank",
        "Rank that recently took longest for the attention of its first layer, which is the same work on every rank.",
        is_timed=True,
    ),
    Metric(
        "slowest_node",
        "node",
        "Node of that rank. Nodes keep their numbers; ranks are renumbered when nodes change.",
        is_timed=True,
    ),
    Metric(
        "slowest_rank_over_median",
        "1",
        "Time of that rank over the time of the (lower) median rank; about 1 if no rank is slower than the others.",
        is_timed=True,
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Metrics by name."""


def _spread(prefix: str, whose: str) -> tuple[Metric, ...]:
    return (
        Metric(
            f"{prefix}p50_over_even",
            "1",
            f"Median load of {whose}; a load is the number of tokens over the even share.",
        ),
        Metric(f"{prefix}p95_over_even", "1", f"95th percentile of the load of {whose}."),
        Metric(f"{prefix}max_over_even", "1", f"Largest load of {whose}."),
    )


_HHI = (
    "Herfindahl-Hirschman index (HHI) times experts, `E * sum(share_e ** 2)`: 1 is even, E is all tokens on one expert"
)

_FROM_EVENTS = (
    Metric("evaluation_loss", "nats/token", "Mean validation loss per token, after this iteration."),
    *_spread("expert_load/layer_<n>_", "the experts of layer n"),
    Metric("expert_load/layer_<n>_hhi_over_even", "1", f"{_HHI}."),
    *_spread("expert_load/", "the experts of all layers"),
    Metric("expert_load/hhi_over_even", "1", "The HHI of a layer, mean over layers."),
    Metric("replicas/fewest", "copies", "Copies of the expert that has fewest, over all layers."),
    Metric("replicas/mean", "copies", "Mean number of copies of an expert in the placement in force."),
    Metric("replicas/most", "copies", "Copies of the expert that has most, over all layers."),
    Metric(
        "replicas/single_loss_survival",
        "1",
        "Probability that the job survives the loss of one failure domain, all being equally likely: every expert "
        "keeps a copy, and recovery.min_nodes nodes remain. Reported only if recovery.min_nodes is set.",
    ),
    Metric("snapshot/window_iterations", "iterations", "Iterations that together capture every operator once (W)."),
    Metric(
        "snapshot/stalled_seconds",
        "s",
        "Time that training has waited for captures, in all attempts, on the first rank of the job.",
    ),
    Metric("snapshot/captured_bytes", "bytes", "Bytes that the first rank has captured so far."),
    Metric(
        "snapshot/replicated_bytes",
        "bytes",
        "Bytes that the snapshot server of the first rank has sent so far, for all peers together.",
    ),
    Metric(
        "snapshot/persisted_bytes",
        "bytes",
        "Bytes that the snapshot server of the first rank has written to storage so far.",
    ),
    Metric("upstream_log/rank_bytes", "bytes", "Memory of the upstream log on the rank with the largest log."),
    Metric("upstream_log/node_bytes", "bytes", "Memory of upstream logs on the node with the largest logs."),
    Metric(
        "goodput/ettr",
        "1",
        "Effective training time ratio so far: time of iterations that count, divided by wall time.",
    ),
    Metric(
        "goodput/ettr_predicted",
        "1",
        "ETTR so far by the closed formula, from this run's waiting times, interruptions and their cost.",
    ),
    Metric(
        "goodput/tokens_per_second",
        "tokens/s",
        "Goodput so far: tokens of the iterations that count, divided by wall time.",
    ),
    Metric("goodput/interruptions", "1", "Recoveries, changes of membership, and jobs that continued the run, so far."),
    Metric(
        "recovery/<strategy>_seconds",
        "s",
        "Time of the recovery before this iteration. The strategy is `replicas`, `localized`, `window`, "
        "`checkpoint`, `nothing`, or `unknown` if no record names it.",
    ),
    Metric(
        "job/attempt",
        "1",
        "Number of times that ranks have been started for this run, this start included.",
    ),
    Metric("job/world_size", "ranks", "Ranks that train."),
)

FROM_EVENTS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _FROM_EVENTS})
"""Metrics that only trackers get. They are computed from the run's records; ``<n>`` and ``<strategy>`` are
placeholders."""


def check_metrics(values: Mapping[str, float]) -> None:
    """Check that all figures are listed and that no required one is missing.

    Raises:
        ValueError: a figure is not listed or missing; the message names it.
    """
    if unknown := [name for name in values if name not in METRICS]:
        raise ValueError(f"metrics.{unknown[0]}: is not listed in megatron_ft/telemetry/metrics.py")
    if missing := [name for name, metric in METRICS.items() if metric.required and name not in values]:
        raise ValueError(f"metrics.{missing[0]}: is required")

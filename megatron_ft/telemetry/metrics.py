"""Every metric of an iteration: its name, its unit, its meaning. The only place where they are listed."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a ``metrics`` record."""

    name: str
    """Key in the record, and the name in wandb."""
    unit: str
    """Unit, or ``1`` for a bare number."""
    meaning: str
    """One sentence."""
    required: bool = False
    """Whether every ``metrics`` record has it."""
    is_timed: bool = False
    """Whether it depends on the clock: runs that are equal in every bit differ in it."""


_ALL = (
    Metric(
        "loss",
        "nats/token",
        "Mean language-model loss over the tokens of all ranks, without auxiliary losses.",
        required=True,
    ),
    Metric("aux_loss", "1", "Load-balancing loss times its coefficient, mean over mixture layers."),
    Metric("z_loss", "1", "Router z-loss times its coefficient, mean over mixture layers."),
    Metric("grad_norm", "1", "Global L2 norm of the gradient before clipping."),
    Metric("clip_coefficient", "1", "Factor the gradient was multiplied by; 1 when it was not clipped."),
    Metric("learning_rate", "1", "Learning rate this iteration's update used."),
    Metric("loss_scale", "1", "Loss scale of this iteration; 1 outside fp16."),
    Metric("tokens", "tokens", "Tokens the loss was taken over in this iteration, over all ranks."),
    Metric("consumed_samples", "samples", "Samples read since the run began, this iteration included."),
    Metric(
        "iteration_seconds", "s", "Wall time of the iteration, from its first microbatch to its end.", is_timed=True
    ),
    Metric("tokens_per_second", "tokens/s", "tokens / iteration_seconds, over all ranks.", is_timed=True),
    Metric("num_microbatches", "microbatches", "Microbatches of one pipeline in this iteration, padding included."),
    Metric(
        "num_padding_microbatches",
        "microbatches",
        "Of all pipelines' microbatches, those that only fill up an uneven division and weigh nothing.",
    ),
    Metric(
        "slowest_rank",
        "rank",
        "Rank that has recently taken longest for the attention of its first layer: the same work on all.",
        is_timed=True,
    ),
    Metric(
        "slowest_node",
        "node",
        "Its node, by the number that it has had since the job began: ranks get new numbers as nodes change.",
        is_timed=True,
    ),
    Metric(
        "slowest_rank_over_median",
        "1",
        "Its time over the time of the (lower) median rank: about 1 where no rank is slower than the others.",
        is_timed=True,
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Name to metric."""


def _spread(prefix: str, whose: str) -> tuple[Metric, ...]:
    return (
        Metric(f"{prefix}p50_over_even", "1", f"Median load of {whose}: tokens over the even share."),
        Metric(f"{prefix}p95_over_even", "1", f"Load that 95 % of {whose} stay below."),
        Metric(f"{prefix}max_over_even", "1", f"Load of the busiest of {whose}."),
    )


_HHI = (
    "Herfindahl-Hirschman index (HHI) times experts, `E * sum(share_e ** 2)`: 1 is even, E is all tokens on one expert"
)

_FROM_EVENTS = (
    Metric("evaluation_loss", "nats/token", "Mean validation loss per token, after this iteration."),
    *_spread("expert_load/layer_<n>_", "the experts of layer n"),
    Metric("expert_load/layer_<n>_hhi_over_even", "1", f"{_HHI}."),
    *_spread("expert_load/", "the experts of all layers"),
    Metric("expert_load/hhi_over_even", "1", "The same, mean over layers."),
    Metric("replicas/fewest", "copies", "Copies of the expert that has fewest, over all layers."),
    Metric("replicas/mean", "copies", "Copies of an expert on average, by the placement in force."),
    Metric("replicas/most", "copies", "Copies of the expert that has most, over all layers."),
    Metric(
        "replicas/single_loss_survival",
        "1",
        "Probability that the job survives the loss of one failure domain, each being as likely: "
        "every expert has a copy left, and launch.min_nodes nodes are left. Only where launch.min_nodes is given.",
    ),
    Metric("snapshot/window_iterations", "iterations", "Iterations that together capture every operator once (W)."),
    Metric(
        "snapshot/stalled_seconds",
        "s",
        "Seconds that training has waited for captures so far, all attempts, on the first rank of the job.",
    ),
    Metric("snapshot/captured_bytes", "bytes", "Bytes that this rank has captured so far."),
    Metric("snapshot/replicated_bytes", "bytes", "Bytes that its snapshot server has sent so far, each peer counted."),
    Metric("snapshot/persisted_bytes", "bytes", "Bytes that its snapshot server has written to storage so far."),
    Metric("upstream_log/rank_bytes", "bytes", "Memory of the upstream log, on the rank that keeps most."),
    Metric("upstream_log/node_bytes", "bytes", "The same on the node that keeps most."),
    Metric(
        "goodput/ettr",
        "1",
        "Effective training time ratio measured so far: time of iterations that count over wall time.",
    ),
    Metric(
        "goodput/ettr_predicted",
        "1",
        "The same by the closed formula, from this run's waiting, interruptions and what they cost so far.",
    ),
    Metric(
        "goodput/tokens_per_second", "tokens/s", "Goodput so far: tokens of the iterations that count over wall time."
    ),
    Metric("goodput/interruptions", "1", "Recoveries, changes of membership and jobs that continued the run so far."),
    Metric(
        "recovery/<strategy>_seconds",
        "s",
        "Time of the recovery before this iteration. The strategy is `replicas`, `localized`, `window`, "
        "`checkpoint`, `nothing`, or `unknown` where no record names it.",
    ),
    Metric(
        "job/attempt",
        "1",
        "How often ranks have been started for this run, this start included: it rises at each restart.",
    ),
    Metric("job/world_size", "ranks", "Ranks that train."),
)

FROM_EVENTS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _FROM_EVENTS})
"""Metrics that trackers get beside these, made from the run's records; ``<n>`` and ``<strategy>`` are placeholders."""


def check_metrics(values: Mapping[str, float]) -> None:
    """Refuse figures that are not listed, and records that lack a required one.

    Raises:
        ValueError: naming the metric.
    """
    if unknown := [name for name in values if name not in METRICS]:
        raise ValueError(f"metrics.{unknown[0]}: is not listed in megatron_ft/telemetry/metrics.py")
    if missing := [name for name, metric in METRICS.items() if metric.required and name not in values]:
        raise ValueError(f"metrics.{missing[0]}: is required")

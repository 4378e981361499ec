"""Every metric of an iteration: its name, its unit, its meaning. The only place where they are listed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
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
        name="loss",
        unit="nats/token",
        meaning="Mean language-model loss over the tokens of all ranks, without auxiliary losses.",
        required=True,
    ),
    Metric(name="aux_loss", unit="1", meaning="Load-balancing loss times its coefficient, mean over mixture layers."),
    Metric(name="z_loss", unit="1", meaning="Router z-loss times its coefficient, mean over mixture layers."),
    Metric(name="grad_norm", unit="1", meaning="Global L2 norm of the gradient before clipping."),
    Metric(
        name="clip_coefficient", unit="1", meaning="What the gradient was multiplied by; 1 when it was not clipped."
    ),
    Metric(name="learning_rate", unit="1", meaning="Learning rate this iteration's update used."),
    Metric(name="loss_scale", unit="1", meaning="Loss scale of this iteration; 1 outside fp16."),
    Metric(name="tokens", unit="tokens", meaning="Tokens the loss was taken over in this iteration, over all ranks."),
    Metric(
        name="consumed_samples", unit="samples", meaning="Samples read since the run began, this iteration included."
    ),
    Metric(
        name="iteration_seconds",
        unit="s",
        meaning="Wall time of the iteration, from its first microbatch to its end.",
        is_timed=True,
    ),
    Metric(
        name="tokens_per_second", unit="tokens/s", meaning="tokens / iteration_seconds, over all ranks.", is_timed=True
    ),
    Metric(
        name="num_microbatches",
        unit="microbatches",
        meaning="Microbatches of one pipeline in this iteration, padding included.",
    ),
    Metric(
        name="num_padding_microbatches",
        unit="microbatches",
        meaning="Of all pipelines' microbatches, those that only fill up an uneven division and weigh nothing.",
    ),
    Metric(
        name="slowest_rank",
        unit="rank",
        meaning="Rank that has lately taken longest for the attention of its first layer: the same work on all.",
        is_timed=True,
    ),
    Metric(
        name="slowest_node",
        unit="node",
        meaning="Its node, by the number that it has had since the job began: ranks are numbered anew as nodes change.",
        is_timed=True,
    ),
    Metric(
        name="slowest_rank_over_median",
        unit="1",
        meaning="What it takes for it over what the (lower) median rank takes: about 1 where nobody is slower alone.",
        is_timed=True,
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Name to metric."""


def _spread(prefix: str, whose: str) -> tuple[Metric, ...]:
    return (
        Metric(name=f"{prefix}p50_over_even", unit="1", meaning=f"Median load of {whose}: tokens over the even share."),
        Metric(name=f"{prefix}p95_over_even", unit="1", meaning=f"Load that 95 % of {whose} stay below."),
        Metric(name=f"{prefix}max_over_even", unit="1", meaning=f"Load of the busiest of {whose}."),
    )


_HHI = (
    "Herfindahl-Hirschman index (HHI) times experts, `E * sum(share_e ** 2)`: 1 is even, E is all tokens on one expert"
)

_FROM_EVENTS = (
    Metric(name="evaluation_loss", unit="nats/token", meaning="Mean validation loss per token, after this iteration."),
    *_spread("expert_load/layer_<n>_", "the experts of layer n"),
    Metric(name="expert_load/layer_<n>_hhi_over_even", unit="1", meaning=f"{_HHI}."),
    *_spread("expert_load/", "the experts of all layers"),
    Metric(name="expert_load/hhi_over_even", unit="1", meaning="The same, mean over layers."),
    Metric(name="replicas/fewest", unit="copies", meaning="Copies of the expert that has fewest, over all layers."),
    Metric(name="replicas/mean", unit="copies", meaning="Copies of an expert on average, by the placement in force."),
    Metric(name="replicas/most", unit="copies", meaning="Copies of the expert that has most, over all layers."),
    Metric(
        name="replicas/single_loss_survival",
        unit="1",
        meaning="Probability that the job goes on in its ranks when one failure domain is lost, each being as likely: "
        "every expert has a copy left, and launch.min_nodes nodes are left. Only where launch.min_nodes is given.",
    ),
    Metric(
        name="snapshot/window_iterations",
        unit="iterations",
        meaning="Iterations that together capture every operator once (W).",
    ),
    Metric(
        name="snapshot/stalled_seconds",
        unit="s",
        meaning="Seconds that training has waited for captures so far, all attempts, on the first rank of the job.",
    ),
    Metric(name="snapshot/captured_bytes", unit="bytes", meaning="Bytes that this rank has captured so far."),
    Metric(
        name="snapshot/replicated_bytes",
        unit="bytes",
        meaning="Bytes that its keeper has sent to peers so far, each peer counted.",
    ),
    Metric(
        name="snapshot/persisted_bytes", unit="bytes", meaning="Bytes that its keeper has written to storage so far."
    ),
    Metric(
        name="upstream_log/rank_bytes", unit="bytes", meaning="Memory of the upstream log, on the rank that keeps most."
    ),
    Metric(name="upstream_log/node_bytes", unit="bytes", meaning="The same on the node that keeps most."),
    Metric(
        name="goodput/ettr",
        unit="1",
        meaning="Effective training time ratio measured so far: time of iterations that count over wall time.",
    ),
    Metric(
        name="goodput/ettr_predicted",
        unit="1",
        meaning="The same by the closed formula, from this run's waiting, interruptions and what they cost so far.",
    ),
    Metric(
        name="goodput/tokens_per_second",
        unit="tokens/s",
        meaning="Goodput so far: tokens of the iterations that count over wall time.",
    ),
    Metric(
        name="goodput/interruptions",
        unit="1",
        meaning="Recoveries, changes of membership and jobs that went on with the run so far.",
    ),
    Metric(
        name="recovery/<rung>_seconds",
        unit="s",
        meaning="What the recovery before this iteration took. The rung is `replicas`, `localized`, `window`, "
        "`checkpoint`, `nothing`, or `unknown` where no record says it.",
    ),
    Metric(
        name="job/attempt",
        unit="1",
        meaning="How often ranks have been started for this run, this start included: it rises at each restart.",
    ),
    Metric(name="job/world_size", unit="ranks", meaning="Ranks that train."),
)

FROM_EVENTS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _FROM_EVENTS})
"""Metrics that trackers get beside these, made from the run's records; ``<n>`` and ``<rung>`` stand for what they name.
"""
_FROM_EVENTS_PATTERN = re.compile("|".join(re.sub("<[a-z]+>", "[a-z0-9]+", name) for name in FROM_EVENTS))


def is_listed(name: str) -> bool:
    """Whether a name is in one of the two lists."""
    return name in METRICS or _FROM_EVENTS_PATTERN.fullmatch(name) is not None


def check_metrics(values: Mapping[str, float]) -> None:
    """Refuse figures that are not listed, and records that lack a required one.

    Raises:
        ValueError: naming the metric.
    """
    if unknown := [name for name in values if name not in METRICS]:
        raise ValueError(f"metrics.{unknown[0]}: is not listed in megatron_ft/telemetry/metrics.py")
    if missing := [name for name, metric in METRICS.items() if metric.required and name not in values]:
        raise ValueError(f"metrics.{missing[0]}: is required")

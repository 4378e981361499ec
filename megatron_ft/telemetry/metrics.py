"""Every metric of an iteration: its name, its unit, its meaning. The only place where they are listed."""

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
        name="iteration_seconds", unit="s", meaning="Wall time of the iteration, from its first microbatch to its end."
    ),
    Metric(name="tokens_per_second", unit="tokens/s", meaning="tokens / iteration_seconds, over all ranks."),
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
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Name to metric."""


def check_metrics(values: Mapping[str, float]) -> None:
    """Refuse figures that are not listed, and records that lack a required one.

    Raises:
        ValueError: naming the metric.
    """
    if unknown := [name for name in values if name not in METRICS]:
        raise ValueError(f"metrics.{unknown[0]}: is not listed in megatron_ft/telemetry/metrics.py")
    if missing := [name for name, metric in METRICS.items() if metric.required and name not in values]:
        raise ValueError(f"metrics.{missing[0]}: is required")

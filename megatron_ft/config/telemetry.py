"""Metrics, events and alerts (group ``telemetry``)."""

from dataclasses import dataclass, field
from typing import Any


def _sinks() -> dict[str, Any]:
    sinks = "megatron_ft.telemetry.sinks"
    return {
        "wandb": {"_target_": f"{sinks}.wandb.WandbSink"},
        "alerts": {"_target_": f"{sinks}.alerts.AlertSink"},
        "metrics": {"_target_": f"{sinks}.jsonl.JsonlSink", "metrics": True},
        "summary": {"_target_": f"{sinks}.summary.SummarySink"},
        "events": {"_target_": f"{sinks}.jsonl.JsonlSink", "metrics": False},
        "terminal": {"_target_": f"{sinks}.terminal.TerminalSink"},
    }


@dataclass
class TelemetryConfig:
    """Sinks of metrics and events, and limits of alerts."""

    sinks: dict[str, Any] = field(default_factory=_sinks)
    """Sinks that receive records, by name. ``_target_`` names the class of a sink; the other entries are arguments of
    the class. null removes a sink. ``conf/telemetry/default.yaml`` lists the default sinks, of which ``metrics`` and
    ``events`` cannot be removed."""
    log_interval_iterations: int = 1
    """Number of iterations after which metrics are reported."""
    expert_load_interval_iterations: int = 1
    """Number of iterations after which the tokens per expert and layer are reported; 0 never reports them."""
    progress: str = "auto"
    """Progress display: ``live``, ``plain`` or ``auto`` (``live`` on a terminal, otherwise ``plain``)."""
    wandb: str = "auto"
    """Mode of wandb: ``online``, ``offline``, ``disabled`` or ``auto`` (``online`` if logged in, else ``offline``)."""
    wandb_project: str = "megatron-ft"
    """Project name in wandb."""
    wandb_entity: str | None = None
    """Team in wandb; null for the user's default."""
    alert_single_loss_survival: float | None = 1.0
    """Alert if the probability that the job survives the loss of one failure domain without a restart is below this
    limit. The probability is known only for jobs that recover by expert replicas (``recovery.min_nodes``). null: no
    alert."""
    alert_stall_share: float | None = 0.05
    """Alert if training waits for captures for more than this share of the time, over five windows. null: no alert."""
    alert_windows_behind: float | None = 3.0
    """Alert if more windows than this are due since the last committed window. null: no alert."""
    alert_free_disk_share: float | None = 0.05
    """Alert if less than this share of the run folder's file system is free. null: no alert."""
    alert_slowest_rank_over_median: float | None = 2.0
    """Alert if the slowest rank needs more than this many times the median rank's time. null: no alert."""

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
    """Sinks for records, by name. ``_target_`` names the class; the other entries are arguments of it. null removes
    a sink. The sinks of ``conf/telemetry/default.yaml`` are the defaults; ``metrics`` and ``events`` are always
    needed."""
    log_interval_iterations: int = 1
    """Number of iterations between two reports of metrics."""
    expert_load_interval_iterations: int = 1
    """Number of iterations between two reports of tokens per expert and layer; 0 reports none."""
    progress: str = "auto"
    """``live``, ``plain`` or ``auto`` (live on a terminal)."""
    wandb: str = "auto"
    """``online``, ``offline``, ``disabled`` or ``auto`` (online when logged in, else offline)."""
    wandb_project: str = "megatron-ft"
    """Project name in wandb."""
    wandb_entity: str | None = None
    """Team in wandb; null for the default."""
    alert_single_loss_survival: float | None = 1.0
    """Limit for the probability that the job survives the loss of one failure domain without a restart. An alert is
    reported below it; null never. The probability is known only for jobs that continue by expert replicas
    (``recovery.min_nodes``)."""
    alert_stall_share: float | None = 0.05
    """Limit for the share of iteration time that training waits for captures, over five windows. An alert is reported
    above it; null never."""
    alert_windows_behind: float | None = 3.0
    """Limit for the windows that are due while none has been committed. An alert is reported above it; null never."""
    alert_free_disk_share: float | None = 0.05
    """Limit for the free share of the file system of the run's folder. An alert is reported below it; null never."""
    alert_slowest_rank_over_median: float | None = 2.0
    """Limit for the time of the slowest rank divided by the time of the median rank for the same work. An alert is
    reported above it; null never."""

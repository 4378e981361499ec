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
    """Places records go to, by name: ``_target_`` names the class, the other entries are its arguments; null for none.
    The sinks of ``conf/telemetry/default.yaml`` are the defaults; ``metrics`` and ``events`` are always needed."""
    log_interval_iterations: int = 1
    """Iterations from one report of metrics to the next."""
    expert_load_interval_iterations: int = 1
    """Iterations from one report of tokens per expert and layer to the next; 0 reports none."""
    progress: str = "auto"
    """``live``, ``plain`` or ``auto`` (live on a terminal)."""
    wandb: str = "auto"
    """``online``, ``offline``, ``disabled`` or ``auto`` (online when logged in, else offline)."""
    wandb_project: str = "megatron-ft"
    """Project name in wandb."""
    wandb_entity: str | None = None
    """Team in wandb; null for the default."""
    alert_single_loss_survival: float | None = 1.0
    """Alert when the probability of surviving the loss of one failure domain without a restart is below this; null
    never. Known only for jobs that continue by expert replicas (``recovery.min_nodes``)."""
    alert_stall_share: float | None = 0.05
    """Alert when capture stalls take more than this share of iteration time, over five windows; null never."""
    alert_windows_behind: float | None = 3.0
    """Alert when more windows than this are due and none has been committed; null never."""
    alert_free_disk_share: float | None = 0.05
    """Alert when less than this share of the file system of the run's folder is free; null never."""
    alert_slowest_rank_over_median: float | None = 2.0
    """Alert when the slowest rank takes more than this many times as long as the median rank for the same work; null
    never."""

"""What is reported, where (group ``telemetry``)."""

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
    """Sinks of metrics and events."""

    sinks: dict[str, Any] = field(default_factory=_sinks)
    """Places records go to, by name: ``_target_`` names the class, the other entries are its arguments; null for none.
    The sinks of ``conf/telemetry/default.yaml`` are the defaults; ``metrics`` and ``events`` are always needed."""
    log_interval_iterations: int = 1
    """Report metrics every so many iterations."""
    expert_load_interval_iterations: int = 1
    """Report tokens per expert and layer every so many iterations; 0 never."""
    progress: str = "auto"
    """``live``, ``plain`` or ``auto`` (live on a terminal)."""
    wandb: str = "auto"
    """``online``, ``offline``, ``disabled`` or ``auto`` (online when logged in, else offline)."""
    wandb_project: str = "megatron-ft"
    """Project name in wandb."""
    wandb_entity: str | None = None
    """Team in wandb; null for the default."""
    alert_single_loss_survival: float | None = 1.0
    """Alert when the probability that the job goes on in its ranks after the loss of one failure domain is below this;
    null never. Only jobs that go on by expert replicas (``launch.min_nodes``) know it."""
    alert_stall_share: float | None = 0.05
    """Alert when training waits for captures for more than this share of its iterations, over five windows; null
    never."""
    alert_windows_behind: float | None = 3.0
    """Alert when more windows than this are due and none was committed: peers or storage are behind; null never."""
    alert_free_disk_share: float | None = 0.05
    """Alert when less than this share of the file system of the run's folder is free; null never."""
    alert_slowest_rank_over_median: float | None = 2.0
    """Alert when the slowest rank takes longer than this many times the median rank for the same work; null never."""

"""Configuration of metrics, profiles and sinks (group ``telemetry``)."""

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
    """Sinks of metrics and events, profiles, and limits that raise alerts."""

    sinks: dict[str, Any] = field(default_factory=_sinks)
    """Sinks that receive records, by name. ``_target_`` names the class of a sink; the other entries are arguments of
    the class. null removes a sink. ``conf/telemetry/default.yaml`` lists the default sinks, of which ``metrics`` and
    ``events`` cannot be removed."""
    log_interval_iterations: int = 1
    """Number of iterations between two reports of metrics."""
    peak_tflops: float | None = None
    """Peak rate in TFLOP/s of one GPU, or of one rank on CPUs, for the metric ``mfu``. null: the
    rate that ``mcore/training/reporting.py`` lists for the GPU. Without a known rate, ``mfu`` is not reported, and a
    note is printed."""
    profile_first_iteration: int | None = None
    """First iteration that ``torch.profiler`` records; null records no profile."""
    profile_iterations: int = 3
    """Number of iterations that ``torch.profiler`` records."""
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record a profile. Each of them writes a trace file for chrome://tracing or Perfetto."""
    profile_dir: str | None = None
    """Folder of the profiles' trace files; null means ``profiles`` in the run's folder."""
    expert_load_interval_iterations: int = 1
    """Number of iterations between two reports of the tokens per expert and layer; 0 never reports them."""
    progress: str = "auto"
    """Progress display: ``live``, ``plain`` or ``auto`` (``live`` on a terminal, otherwise ``plain``)."""
    wandb: str = "auto"
    """Mode of wandb: ``online``, ``offline``, ``disabled`` or ``auto`` (``online`` if logged in, else ``offline``)."""
    wandb_project: str = "megatron-ft"
    """Project name in wandb."""
    wandb_entity: str | None = None
    """Entity (user or team) in wandb; null means the default entity of the user."""
    alert_single_loss_survival: float | None = 1.0
    """Alert if the probability to survive the loss of one failure domain without a restart is below this limit. The
    probability is known only for jobs that recover by expert replicas (``recovery.min_nodes``). null: no alert."""
    alert_stall_share: float | None = 0.05
    """Alert if training waited for captures during more than this share of the last five windows. null: no alert."""
    alert_windows_behind: float | None = 3.0
    """Alert if no window was committed for more iterations than this number times the iterations from the start of one
    window to the start of the next. null: no alert."""
    alert_free_disk_share: float | None = 0.05
    """Alert if less than this share of the run folder's file system is free. null: no alert."""
    alert_slowest_rank_over_median: float | None = 2.0
    """Alert if the slowest rank's time exceeds this factor times the median time of all ranks. null: no alert."""
    alert_lost_token_share: float | None = 0.0375
    """Alert if more than this share of all tokens of the training is lost. A token counts as lost if its updates of
    experts were lost in a recovery, or would be lost in a recovery from the newest window. Tokens are lost only if
    windows leave out experts. null: no alert."""

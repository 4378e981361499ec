"""What is reported, where (group ``telemetry``)."""

from dataclasses import dataclass


@dataclass
class TelemetryConfig:
    """Sinks of metrics and events."""

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

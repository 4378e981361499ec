"""Log of tensors sent between pipeline stages, for replays of single stages (group ``upstream_log``)."""

from dataclasses import dataclass


@dataclass
class UpstreamLogConfig:
    """Log of activations and gradients sent between pipeline stages, with ``recovery.keep_layout``."""

    commit_lag_iterations: int = 4
    """Largest number of iterations from a window's last slice to the vote that commits it; the log holds two windows
    and twice this number of iterations."""
    memory_limit_bytes: int | None = None
    """Largest memory for the logs of one node, checked before it is allocated; null checks nothing."""

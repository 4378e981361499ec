"""Log of tensors sent between pipeline stages, from which single stages replay (group ``upstream_log``)."""

from dataclasses import dataclass


@dataclass
class UpstreamLogConfig:
    """Log of activations and gradients sent between pipeline stages, used with ``recovery.keep_layout``."""

    commit_lag_iterations: int = 4
    """Largest expected number of iterations from the last slice of a window to its commit. The log has space for two
    windows and twice this number of iterations."""
    memory_limit_bytes: int | None = None
    """Largest memory that the logs of one node may use, checked before it is allocated. null checks nothing."""

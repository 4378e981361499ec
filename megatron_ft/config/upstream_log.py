"""Log of tensors sent between pipeline stages, for replays of single stages (group ``upstream_log``)."""

from dataclasses import dataclass


@dataclass
class UpstreamLogConfig:
    """Log of activations and gradients sent between pipeline stages, for ``recovery.keep_layout``."""

    commit_lag_iterations: int = 4
    """Largest number of iterations between the last slice of a window and the vote that commits the window. The log has
    space for two windows and twice this number of iterations."""
    memory_limit_bytes: int | None = None
    """Limit of the memory for the logs of one node, checked before the memory is allocated. null checks nothing."""

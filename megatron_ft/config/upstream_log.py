"""What ranks send over pipeline boundaries, kept for stages that go back (group ``upstream_log``)."""

from dataclasses import dataclass


@dataclass
class UpstreamLogConfig:
    """The log of activations and gradients sent between pipeline stages, with ``launch.keep_layout``."""

    commit_lag_iterations: int = 4
    """Iterations from a window's last slice to the vote that commits it, at most: the log has room for two windows and
    twice so many more."""
    memory_limit_bytes: int | None = None
    """Most memory that the logs of one node may take; more is refused before it is taken. Null checks nothing."""

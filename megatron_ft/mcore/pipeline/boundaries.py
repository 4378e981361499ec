"""Pipeline boundaries of one rank; the log of their messages outlives the process groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron_ft.mcore.pipeline.communicator import LoggingCommunicator
from megatron_ft.planning.commit import Vote
from megatron_ft.runtime.upstream_log.log import UpstreamLog


class Boundaries:
    """Connects a rank to the adjacent stages."""

    def __init__(self) -> None:
        self._log: UpstreamLog | None = None
        self._communicator: LoggingCommunicator | None = None

    @property
    def log(self) -> UpstreamLog | None:
        """Log of sent messages; None if messages are not logged."""
        return self._log

    @log.setter
    def log(self, log: UpstreamLog | None) -> None:
        self._log = log
        if self._communicator is not None:
            self._communicator.log = log

    def connect(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig) -> LoggingCommunicator:
        """Create the communicator for Megatron's schedules."""
        self._communicator = LoggingCommunicator(pp_group, config, self._log)
        return self._communicator

    def release(self) -> None:
        """Release the group."""
        self._communicator = None

    @contextmanager
    def logging(self, iteration: int, generation: int) -> Iterator[None]:
        """Log messages that are sent in this context as messages of ``iteration``."""
        log = self._log
        if log is None:
            yield
            return
        log.begin(iteration, generation)
        try:
            yield
            # Not in ``finally``: an iteration that broke has not sent everything, and is left out of the log.
            log.end()
        finally:
            log.abandon()

    def commit(self, vote: Vote) -> None:
        if self._log is not None:
            self._log.commit(vote)

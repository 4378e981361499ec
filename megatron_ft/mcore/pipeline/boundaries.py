"""Connects the upstream log of a rank to the communicator of the current process groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron_ft.mcore.pipeline.communicator import LoggingCommunicator
from megatron_ft.planning.commit import Vote
from megatron_ft.runtime.upstream_log.log import UpstreamLog


class Boundaries:
    """Connection of a rank to the adjacent pipeline stages. The log survives when the process groups are replaced."""

    def __init__(self) -> None:
        self._log: UpstreamLog | None = None
        self._communicator: LoggingCommunicator | None = None

    @property
    def log(self) -> UpstreamLog | None:
        """Log of the messages that this rank sends; None if messages are not logged."""
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
        """Release the communicator, so that its process group can be destroyed. The log stays."""
        self._communicator = None

    @contextmanager
    def logging(self, iteration: int, generation: int) -> Iterator[None]:
        """Log all messages that are sent in this context as messages of ``iteration`` in ``generation``."""
        log = self._log
        if log is None:
            yield
            return
        log.begin(iteration, generation)
        try:
            yield
            # Not in ``finally``, because a failed iteration has not sent all messages and must not be logged.
            log.end()
        finally:
            log.abandon()

    def commit(self, vote: Vote) -> None:
        if self._log is not None:
            self._log.commit(vote)

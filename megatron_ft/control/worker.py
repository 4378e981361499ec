"""A rank's side of the control plane: what a rank is told, and how it answers."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_ft.errors import ControlError
from megatron_ft.framing import send

Record = dict[str, Any]


class WorkerClient(Protocol):
    """What a rank may say and ask."""

    def report(self, record: Record) -> None:
        """Hand a metrics or event record to the sinks. Blocks while they are behind; nothing is dropped."""

    def progress(self, iteration: int, phase: str) -> None:
        """Say where this rank is; cheap enough for every phase."""

    def stop_requested(self) -> bool:
        """Whether to finish this iteration, write a checkpoint and return.

        Ranks learn of a request at slightly different moments: let the commit vote settle at which iteration.
        """

    def close(self) -> None:
        """Say nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Who a rank is. ``rank`` is global; ``generation`` counts memberships from 0."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    num_nodes: int
    generation: int
    master_addr: str
    master_port: int
    run_dir: Path
    resume_from: Path | None
    """The run's ``checkpoints`` folder when the run is to be continued from its newest valid checkpoint (after a
    restart always: ``generation`` > 0); null starts fresh (or from ``checkpoint.load``)."""
    worker: WorkerClient
    services: Mapping[str, Any] = field(default_factory=dict)
    """Name of a service of the nodes to ``socket`` (path of its own node's), ``token``, and ``addresses`` (node number
    as text to ``host:port``)."""


class StopFlag:
    """Set by the signals that ask a rank to stop."""

    def __init__(self) -> None:
        self._requested = False

    def install(self, *signals: signal.Signals) -> None:
        """Let ``signals`` set the flag. Main thread only."""
        for number in signals:
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True

    def __bool__(self) -> bool:
        return self._requested


class AgentClient:
    """``WorkerClient`` over the agent's unix socket.

    Messages go out in the calling thread: when the agent is behind, the socket's buffer is full and the call blocks.
    """

    def __init__(self, path: str, *, rank: int, generation: int, stop: StopFlag) -> None:
        """Connect and report.

        Raises:
            ControlError: no agent listens at ``path``.
        """
        self._stop = stop
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise ControlError(f"rank {rank} cannot reach its agent at {path}: {error}") from error
        self._send({"op": "hello", "rank": rank, "generation": generation})

    def report(self, record: Record) -> None:
        """See ``WorkerClient``.

        Raises:
            ControlError: the agent is gone.
        """
        self._send({"op": "record", "record": record})

    def progress(self, iteration: int, phase: str) -> None:
        """See ``WorkerClient``."""
        self._send({"op": "progress", "iteration": iteration, "phase": phase})

    def raised(self, traceback: str, *, error: str, exit_code: int | None) -> None:
        """Say that this rank ends with an exception.

        Args:
            error: its last line.
            exit_code: of an error of this project's own, else ``None``.
        """
        message = {"op": "raised", "traceback": traceback[-65536:], "error": error[:4096], "exit_code": exit_code}
        self._send({**message, "at_seconds": time.time()})

    def done(self) -> None:
        """Say that this rank's work is done and that it ends."""
        self._send({"op": "done"})

    def stop_requested(self) -> bool:
        """See ``WorkerClient``."""
        return bool(self._stop)

    def close(self) -> None:
        """See ``WorkerClient``."""
        with self._lock:
            self._socket.close()

    def _send(self, message: Record) -> None:
        try:
            with self._lock:
                send(self._socket, message)
        except OSError as error:
            raise ControlError(f"the node's agent is gone: {error}") from error


class InProcessClient:
    """``WorkerClient`` of a rank that has no agent: records go straight to ``write``."""

    def __init__(self, write: Callable[[Record], None], *, stop: StopFlag) -> None:
        self._write = write
        self._stop = stop
        self._lock = threading.Lock()

    def report(self, record: Record) -> None:
        """See ``WorkerClient``."""
        with self._lock:
            self._write(record)

    def progress(self, iteration: int, phase: str) -> None:
        """See ``WorkerClient``; nobody listens."""

    def stop_requested(self) -> bool:
        """See ``WorkerClient``."""
        return bool(self._stop)

    def close(self) -> None:
        """See ``WorkerClient``."""

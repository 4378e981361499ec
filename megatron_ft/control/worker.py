"""A rank's side of the control plane: what a rank is told, and how it answers."""

import contextlib
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_ft.errors import ControlError, MegatronFtError
from megatron_ft.framing import FrameReader, Message, send
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position

Record = dict[str, Any]

HangUp = Callable[[str], None]
"""Takes the reason."""

_MAX_TRACEBACK, _MAX_ERROR = 65536, 4096


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

    @property
    def can_survive(self) -> bool:
        """Whether this rank may go on when others are lost: ``launch.min_nodes`` is less than ``launch.num_nodes``."""

    def on_break(self, hang_up: HangUp) -> None:
        """Have ``hang_up(reason)`` called when others are lost, so that no collective waits for them.

        It is called in another thread, once at most in each membership; at once if that has been broken already, and
        again in the next ones unless another takes its place.
        """

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        """Say how far this rank is when its iteration has failed, and wait for the next membership.

        Args:
            position: by this rank's number in the membership that ends.
            error: what the iteration failed with; the rank's own failure where nobody is lost.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this rank cannot survive.
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

    def __init__(self, path: str, *, rank: int, generation: int, stop: StopFlag, can_survive: bool = False) -> None:
        """Connect and report.

        Args:
            can_survive: the agent may speak, too; a thread listens to it.

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
        self._rank, self._generation = rank, generation
        self._changed = threading.Condition()
        self._hang_up: HangUp | None = None
        self._broken: str | None = None
        self._next: NextMembership | None = None
        self._ended: str | None = None
        self._listener: threading.Thread | None = None
        if can_survive:
            self._listener = threading.Thread(target=self._listen, name="agent", daemon=True)
            self._listener.start()
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
        self._send({"op": "raised", **_words(traceback, error, exit_code)})

    def done(self) -> None:
        """Say that this rank's work is done and that it ends."""
        self._send({"op": "done"})

    def stop_requested(self) -> bool:
        """See ``WorkerClient``."""
        return bool(self._stop)

    @property
    def can_survive(self) -> bool:
        """See ``WorkerClient``."""
        return self._listener is not None

    def on_break(self, hang_up: HangUp) -> None:
        """See ``WorkerClient``."""
        with self._changed:
            self._hang_up = hang_up
            reason = self._broken
        if reason is not None:
            threading.Thread(target=hang_up, args=(reason,), name="hang up", daemon=True).start()

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        """See ``WorkerClient``."""
        if self._listener is None:
            raise ControlError("launch.min_nodes: this job needs all of its nodes")
        if (position.rank, position.generation) != (self._rank, self._generation):
            raise ControlError(f"rank {self._rank} of generation {self._generation} speaks for {position}")
        self._send({"op": "broken", "position": position.to_json(), **_words_of(error)})
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._ended is not None)
            following, self._next = self._next, None
        if following is None:
            raise ControlError(f"training does not go on in this process: {self._ended}")
        return following

    def _listen(self) -> None:
        """Thread: take what the agent says."""
        reader, closed = FrameReader(self._socket), False
        try:
            while not closed:
                messages, closed = reader.pump()
                for message in messages:
                    self._told(message)
        finally:
            with self._changed:
                self._ended = self._ended or "nothing is heard of the node's agent any more"
                self._changed.notify_all()

    def _begin(self, following: NextMembership) -> None:
        rank = following.new_rank(self._rank)
        if rank is None:
            raise ControlError(f"rank {self._rank} of generation {self._generation} is not of {following.summary()}")
        self._rank, self._generation = rank, following.generation
        self._next, self._broken = following, None

    def _told(self, message: Message) -> None:
        hang_up = None
        with self._changed:
            match message["op"]:
                case "break":
                    if message["generation"] == self._generation and self._broken is None:
                        self._broken, hang_up = message["reason"], self._hang_up
                case "reform":
                    # Here, not in ``survive``: a break of the new membership may be the very next message.
                    self._begin(NextMembership.from_json(message["next"]))
                case "end":
                    self._ended = message["reason"]
                case other:
                    raise ControlError(f"the node's agent says {other!r}")
            self._changed.notify_all()
        if hang_up is not None:
            hang_up(message["reason"])

    def close(self) -> None:
        """See ``WorkerClient``."""
        if self._listener is not None:
            with contextlib.suppress(OSError):  # the agent has gone already
                self._socket.shutdown(socket.SHUT_RDWR)
            self._listener.join()
        with self._lock:
            self._socket.close()

    def _send(self, message: Record) -> None:
        try:
            with self._lock:
                send(self._socket, message)
        except OSError as error:
            raise ControlError(f"the node's agent is gone: {error}") from error


def _words_of(error: BaseException | str) -> Record:
    if isinstance(error, str):
        return _words(error, error.strip().splitlines()[-1] if error.strip() else "", None)
    own_code = error.exit_code if isinstance(error, MegatronFtError) else None
    last_line = "".join(traceback.format_exception_only(error)).strip()
    return _words("".join(traceback.format_exception(error)), last_line, own_code)


def _words(text: str, error: str, exit_code: int | None) -> Record:
    words = {"traceback": text[-_MAX_TRACEBACK:], "error": error[:_MAX_ERROR], "exit_code": exit_code}
    return {**words, "at_seconds": time.time()}


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

    @property
    def can_survive(self) -> bool:
        """See ``WorkerClient``; what started this rank starts it again."""
        return False

    def on_break(self, hang_up: HangUp) -> None:
        """See ``WorkerClient``; nobody tells of losses."""

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        """See ``WorkerClient``."""
        raise ControlError("a rank without an agent does not outlive the others")

    def close(self) -> None:
        """See ``WorkerClient``."""

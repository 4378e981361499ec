"""``WorkerClient`` over the unix socket of a node's agent."""

import contextlib
import socket
import threading
import time
import traceback
from dataclasses import dataclass

from megatron_ft.control.node.worker_client import HangUp, MembershipOrder, Record, StopFlag
from megatron_ft.errors import ControlError, MegatronFtError
from megatron_ft.framing import FrameReader, Message, send
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position

_MAX_TRACEBACK, _MAX_ERROR = 65536, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a process is when it starts."""

    number: int
    """By which the control plane knows the process as long as it lives: ``node * ranks_per_node + local_rank``."""
    rank: int
    """Its number in the membership of ``generation``; nothing yet for a newcomer."""
    node: int
    local_rank: int
    generation: int
    start: int
    """Of the starts of ranks in this job, the one that made this process; from 0."""
    is_newcomer: bool = False


class AgentClient:
    """Messages go out in the calling thread: when the agent is behind, the socket's buffer is full and the call blocks.

    A thread takes what the agent says and answers its pings.
    """

    def __init__(self, path: str, identity: Identity, *, stop: StopFlag, can_survive: bool = False) -> None:
        """Connect and report.

        Args:
            can_survive: see ``WorkerClient``.

        Raises:
            ControlError: no agent listens at ``path``.
        """
        self._identity = identity
        self._stop = stop
        self._can_survive = can_survive
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise ControlError(f"rank {identity.number} cannot reach its agent at {path}: {error}") from error
        self._rank: int | None = None if identity.is_newcomer else identity.rank
        self._generation = identity.generation
        self._changed = threading.Condition()
        self._hang_up: HangUp | None = None
        self._broken: str | None = None
        self._order: MembershipOrder | None = None
        self._next: NextMembership | None = None
        self._leaves = False
        self._ended: str | None = None
        self._listener = threading.Thread(target=self._listen, name="agent", daemon=True)
        self._listener.start()
        self._send({"op": "hello", "rank": identity.number, "start": identity.start})

    # --- what a rank says and asks -------------------------------------------------------------------------------

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
        return self._can_survive

    def on_break(self, hang_up: HangUp) -> None:
        """See ``WorkerClient``."""
        with self._changed:
            self._hang_up = hang_up
            reason = self._broken
        if reason is not None:
            _call_in_thread(hang_up, reason)

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        """See ``WorkerClient``."""
        self._stand(position, _words_of(error))
        following = self._await_next()
        if following is None:
            raise ControlError("training does not go on in this process: its node leaves the job")
        return following

    def await_membership(self) -> NextMembership:
        """See ``WorkerClient``."""
        if not self._identity.is_newcomer:
            raise ControlError(f"rank {self._rank} was started with the others: it has a membership")
        following = self._await_next()
        if following is None:
            raise ControlError("this node leaves the job before it has joined it")
        return following

    def change_requested(self) -> bool:
        """See ``WorkerClient``."""
        return self._order is not None

    def awaited_change(self) -> MembershipOrder:
        """See ``WorkerClient``."""
        self._check_can_survive()
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._ended is not None)
            if self._order is None:
                raise ControlError(f"training does not go on in this process: {self._ended}")
            return self._order

    def change(self, position: Position) -> NextMembership | None:
        """See ``WorkerClient``."""
        self._stand(position, {"planned": True, "at_seconds": time.time()})
        return self._await_next()

    def close(self) -> None:
        """See ``WorkerClient``."""
        with contextlib.suppress(OSError):  # the agent has gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        with self._lock:
            self._socket.close()

    def _check_can_survive(self) -> None:
        if not self._can_survive:
            raise ControlError("launch.min_nodes: this job needs all of its nodes")

    def _stand(self, position: Position, words: Record) -> None:
        self._check_can_survive()
        if (position.rank, position.generation) != (self._rank, self._generation):
            raise ControlError(f"rank {self._rank} of generation {self._generation} speaks for {position}")
        self._send({"op": "broken", "position": position.to_json(), **words})

    def _await_next(self) -> NextMembership | None:
        """The next membership; None where this rank's node leaves."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._leaves or self._ended is not None)
            following, self._next = self._next, None
        if following is None and not self._leaves:
            raise ControlError(f"training does not go on in this process: {self._ended}")
        return following

    # --- what the agent says, in the listener's thread -----------------------------------------------------------

    def _listen(self) -> None:
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

    def _told(self, message: Message) -> None:
        hang_up = None
        with self._changed:
            match message["op"]:
                case "ping":
                    pass
                case "break":
                    if self._concerns_us(message) and self._broken is None:
                        self._broken, hang_up = message["reason"], self._hang_up
                case "change":
                    if self._concerns_us(message):
                        self._order = MembershipOrder(tuple(message["leaving"]))
                case "leave":
                    self._leaves = self._leaves or self._concerns_us(message)
                case "reform":
                    # Here, not in ``survive``: a break of the new membership may be the very next message.
                    self._begin(NextMembership.from_json(message["next"]))
                case "end":
                    self._ended = message["reason"]
                case other:
                    raise ControlError(f"the node's agent says {other!r}")
            self._changed.notify_all()
        if message["op"] == "ping":
            self._send({"op": "pong"})
        if hang_up is not None:
            _call_in_thread(hang_up, message["reason"])

    def _concerns_us(self, message: Message) -> bool:
        return self._rank is not None and message["generation"] == self._generation

    def _begin(self, following: NextMembership) -> None:
        rank = following.rank_on(self._identity.node, self._identity.local_rank)
        if rank is None or following.previous_ranks[rank] != self._rank:  # None of a newcomer
            who = f"rank {self._rank} of generation {self._generation}, process {self._identity.number},"
            raise ControlError(f"{who} is not of {following.summary()}")
        self._rank, self._generation = rank, following.generation
        self._next, self._broken, self._order = following, None, None

    def _send(self, message: Record) -> None:
        try:
            with self._lock:
                send(self._socket, message)
        except OSError as error:
            raise ControlError(f"the node's agent is gone: {error}") from error


def _call_in_thread(hang_up: HangUp, reason: str) -> None:
    """Break connections without holding up whoever listens to the agent: NCCL takes seconds to abort, and a rank that
    answers no ping meanwhile is killed."""
    threading.Thread(target=hang_up, args=(reason,), name="hang up", daemon=True).start()


def _words_of(error: BaseException | str) -> Record:
    if isinstance(error, str):
        return _words(error, error.strip().splitlines()[-1] if error.strip() else "", None)
    own_code = error.exit_code if isinstance(error, MegatronFtError) else None
    last_line = "".join(traceback.format_exception_only(error)).strip()
    return _words("".join(traceback.format_exception(error)), last_line, own_code)


def _words(text: str, error: str, exit_code: int | None) -> Record:
    words = {"traceback": text[-_MAX_TRACEBACK:], "error": error[:_MAX_ERROR], "exit_code": exit_code}
    return {**words, "at_seconds": time.time()}

"""A rank's side of the control plane: its connection to the node's agent, what it reports, which orders it receives,
and its context (number, membership, sidecars)."""

import contextlib
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_ft.errors import ControlError, MegatronFtError
from megatron_ft.framing import FrameReader, Message, send
from megatron_ft.planning.recovery.membership import NextMembership, Position
from megatron_ft.serde import encode

_MAX_TRACEBACK, _MAX_ERROR = 65536, 4096


Record = dict[str, Any]

Abort = Callable[[str], None]
"""Function that aborts the collectives of a rank; its argument is the reason."""


@dataclass(frozen=True, slots=True)
class MembershipOrder:
    """The order to change the membership at the next iteration boundary. It does not say which nodes will join."""

    leaving: tuple[int, ...]
    """Nodes whose ranks end normally at the boundary, ascending; empty when nodes only join."""


class WorkerClient(Protocol):
    """Calls of a rank to the control plane (its agent and the controller)."""

    def report(self, record: Record) -> None:
        """Send a metrics or event record to the sinks. Blocks while the sinks are slow; nothing is dropped."""

    def progress(self, iteration: int, phase: str) -> None:
        """Report the present phase of the iteration. The call is cheap enough for every phase."""

    def stop_requested(self) -> bool:
        """Whether this rank must stop: finish the iteration, write a checkpoint and return.

        Ranks receive the request at different times, so they must use the commit vote to choose the last iteration.
        """

    @property
    def can_survive(self) -> bool:
        """Whether this rank may continue when nodes are lost, leave or join (see ``JobConfig.may_lose_nodes``)."""

    def on_break(self, abort: Abort) -> None:
        """Register ``abort(reason)``. It is called when other ranks are lost, so that no collective waits for them.

        The call is made in another thread, at most once in each membership, and at once if ranks were lost already.
        ``abort`` stays registered for later memberships until another function replaces it.
        """

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        """Report this rank's position after a failed iteration, and wait for the next membership.

        Args:
            position: position of this rank, with the rank's number in the membership that ends.
            error: the error of the iteration; if no node is lost, it counts as the rank's own failure.

        Raises:
            ControlError: the job ends or restarts all ranks, or this rank cannot continue in its process.
        """

    def await_membership(self) -> NextMembership:
        """Wait for the first membership of this rank, whose node is joining (``RankContext.is_joining``).

        Raises:
            ControlError: the job ends or restarts all ranks, or this node does not join.
        """

    def membership_is_due(self) -> bool:
        """Whether ``await_membership`` would return or raise an error without waiting."""

    def stand_by(self) -> NextMembership | None:
        """Wait as a hot spare, which has no rank in the present membership, for the next membership.

        Returns:
            The next membership, in which this process may have a rank. None if the node of this process leaves; the
            process must then return from its entry function.

        Raises:
            ControlError: the job ends or restarts all ranks.
        """

    def change_requested(self) -> bool:
        """Whether this rank was ordered to stop at an iteration boundary, because nodes join or leave.

        Ranks receive the order at different times, so they must use the commit vote to choose the boundary.
        """

    def awaited_change(self) -> MembershipOrder:
        """Wait for the order that makes ``change_requested`` true, and return the order. Other ranks may have received
        it earlier.

        Raises:
            ControlError: the job ends or restarts all ranks, or this rank cannot continue in its process.
        """

    def change(self, position: Position) -> NextMembership | None:
        """Report that this rank has reached the boundary of a change, and wait for the next membership.

        Args:
            position: position of this rank, with the rank's number in the membership that ends.

        Returns:
            The next membership. None if this rank's node leaves; the rank must then return from its entry function.

        Raises:
            ControlError: the job ends or restarts all ranks, or this rank cannot continue in its process.
        """

    def close(self) -> None:
        """Close the connection; no more messages are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Identity and environment of a rank. ``rank`` is the global rank; ``generation`` counts memberships from 0."""

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
    """The run's ``checkpoints`` folder if the run continues from its newest valid state; always given after a restart
    (``generation`` > 0). None if training begins at iteration 0 or from ``checkpoint.load``."""
    worker: WorkerClient
    sidecars: Mapping[str, Any] = field(default_factory=dict)
    """Maps the name of each sidecar to ``socket`` (path on this node), ``token``, and ``addresses``. ``addresses`` maps
    each node number (as text) to ``host:port``."""
    nodes: tuple[int, ...] = ()
    """Node number of each rank. Nodes lost before this start are missing. Empty if unknown, as under torchrun."""
    local_ranks: tuple[int, ...] = ()
    """Index of each rank's process on its node; empty if ``nodes`` is empty."""
    members: tuple[int, ...] = ()
    """Nodes of the membership, including nodes without a rank. If empty, the members are the nodes in ``nodes``."""
    is_joining: bool = False
    """Whether this process was started while the job was running. Such a process must call
    ``worker.await_membership()`` before it joins any group; the call returns its membership. Until then, ``rank``,
    ``world_size``, ``num_nodes``, ``nodes`` and the master's address describe a membership without this process."""


class StopFlag:
    """Flag that a signal sets to request that a rank stops."""

    def __init__(self) -> None:
        self._requested = False

    def install(self, *signals: signal.Signals) -> None:
        """Let ``signals`` set the flag. Call this in the main thread."""
        for number in signals:
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        # A handler can run between any two instructions, so it only sets the flag. The vote decides when to stop.
        self._requested = True

    def __bool__(self) -> bool:
        return self._requested


class InProcessClient:
    """``WorkerClient`` of a rank without an agent: records go directly to ``write``."""

    def __init__(self, write: Callable[[Record], None], *, stop: StopFlag) -> None:
        self._write = write
        self._stop = stop
        self._lock = threading.Lock()

    def report(self, record: Record) -> None:
        with self._lock:
            self._write(record)

    def progress(self, iteration: int, phase: str) -> None:
        """Do nothing: there is no agent."""

    def stop_requested(self) -> bool:
        return bool(self._stop)

    @property
    def can_survive(self) -> bool:
        return False

    def on_break(self, abort: Abort) -> None:
        """Ignore ``abort``: there is no agent that could report lost ranks."""

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        raise ControlError("a rank without an agent (node process) cannot survive the loss of another rank")

    def await_membership(self) -> NextMembership:
        raise ControlError("a rank without an agent (node process) cannot join a running job")

    def membership_is_due(self) -> bool:
        return True

    def stand_by(self) -> NextMembership | None:
        raise ControlError("a rank without an agent (node process) cannot be a hot spare")

    def change_requested(self) -> bool:
        return False

    def awaited_change(self) -> MembershipOrder:
        raise ControlError("no node can join or leave: this rank runs without an agent (node process)")

    def change(self, position: Position) -> NextMembership | None:
        raise ControlError("no node can join or leave: this rank runs without an agent (node process)")

    def close(self) -> None:
        """Do nothing: there is no connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Numbers by which the control plane identifies a rank's process, as they are when the process starts."""

    number: int
    """Number of the process during its whole life: ``node * ranks_per_node + local_rank``."""
    rank: int
    """Number of the rank in the membership ``generation``. Without meaning for a process that joins a running job."""
    node: int
    local_rank: int
    generation: int
    start: int
    """Index of the ``Start`` order that created this process, from 0. Messages of older processes are ignored."""
    is_joining: bool = False


class AgentClient:
    """Connects a rank to its node's agent. Messages are sent in the calling thread, which blocks while the agent is
    slow. A second thread receives the agent's messages and answers the agent's pings."""

    def __init__(self, path: str, identity: Identity, *, stop: StopFlag, can_survive: bool = False) -> None:
        """Connect to the agent and send the first message.

        Args:
            can_survive: whether this rank may continue when nodes are lost, leave or join.

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
        self._rank: int | None = None if identity.is_joining else identity.rank
        self._is_spare = False
        self._generation = identity.generation
        self._changed = threading.Condition()
        self._abort: Abort | None = None
        self._broken: str | None = None
        self._order: MembershipOrder | None = None
        self._next: deque[NextMembership] = deque()
        """Memberships that have begun but were not returned to the rank yet. Only a hot spare can have several."""
        self._leaves = False
        self._ended: str | None = None
        self._listener = threading.Thread(target=self._listen, name="agent", daemon=True)
        self._listener.start()
        self._send({"op": "hello", "rank": identity.number, "start": identity.start})

    # --- calls of the rank ---------------------------------------------------------------------------------------

    def report(self, record: Record) -> None:
        """Send a record to the sinks, see ``WorkerClient.report``.

        Raises:
            ControlError: the agent is gone.
        """
        self._send({"op": "record", "record": record})

    def progress(self, iteration: int, phase: str) -> None:
        self._send({"op": "progress", "iteration": iteration, "phase": phase})

    def raised(self, traceback: str, *, error: str, exit_code: int | None) -> None:
        """Report that this rank ends with an exception.

        Args:
            error: last line of the traceback.
            exit_code: exit code of the error's class if this project defines the class, otherwise None.
        """
        self._send({"op": "raised", **_failure(traceback, error, exit_code)})

    def done(self, *, is_complete: bool) -> None:
        """Report that this rank has finished and ends. ``is_complete`` means that no later job continues the run."""
        self._send({"op": "done", "is_complete": is_complete})

    def stop_requested(self) -> bool:
        return bool(self._stop)

    @property
    def can_survive(self) -> bool:
        return self._can_survive

    def on_break(self, abort: Abort) -> None:
        with self._changed:
            self._abort = abort
            reason = self._broken
        if reason is not None:
            _call_in_thread(abort, reason)

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        self._report_position(position, _describe(error))
        following = self._await_next()
        if following is None:
            raise ControlError("this process must end: its node leaves the job")
        return following

    def await_membership(self) -> NextMembership:
        if not self._identity.is_joining:
            raise ControlError(f"rank {self._rank} was started with the job and cannot join it again")
        following = self._await_next()
        if following is None:
            raise ControlError("the controller ordered this node to leave before the node had joined the job")
        return following

    def membership_is_due(self) -> bool:
        with self._changed:
            return self._is_due()

    def stand_by(self) -> NextMembership | None:
        # The next membership may have begun already, while this process released its state.
        return self._await_next()

    def change_requested(self) -> bool:
        return self._order is not None

    def awaited_change(self) -> MembershipOrder:
        self._check_can_survive()
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._ended is not None)
            if self._order is None:
                raise ControlError(f"this process must end: {self._ended}")
            return self._order

    def change(self, position: Position) -> NextMembership | None:
        self._report_position(position, {"planned": True, "at_seconds": time.time()})
        return self._await_next()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the agent has gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        with self._lock:
            self._socket.close()

    def _check_can_survive(self) -> None:
        if not self._can_survive:
            raise ControlError("no node can join or leave: lower recovery.min_nodes, set recovery.keep_processes=true")

    def _report_position(self, position: Position, about: Record) -> None:
        self._check_can_survive()
        # The controller would drop such a position as stale and wait for this rank until the time limit.
        if (position.rank, position.generation) != (self._rank, self._generation):
            raise ControlError(
                f"rank {self._rank} of generation {self._generation} cannot report the training position of "
                f"another rank or generation: {position}"
            )
        self._send({"op": "broken", "position": encode(position), **about})

    def _await_next(self) -> NextMembership | None:
        # Wait for the next membership; None if this rank's node leaves.
        with self._changed:
            self._changed.wait_for(self._is_due)
            following = self._next.popleft() if self._next else None
        if following is None and not self._leaves:
            raise ControlError(f"this process must end: {self._ended}")
        return following

    def _is_due(self) -> bool:
        return bool(self._next) or self._leaves or self._ended is not None

    # --- messages of the agent, in the listener's thread ---------------------------------------------------------

    def _listen(self) -> None:
        reader, closed = FrameReader(self._socket), False
        try:
            while not closed:
                messages, closed = reader.pump()
                for message in messages:
                    self._receive(message)
        finally:
            with self._changed:
                self._ended = self._ended or "the connection to the node's agent is closed"
                self._changed.notify_all()

    def _receive(self, message: Message) -> None:
        abort = None
        with self._changed:
            match message["op"]:
                case "ping":
                    pass
                case "break":
                    if self._concerns_us(message) and self._broken is None:
                        self._broken, abort = message["reason"], self._abort
                case "change":
                    if self._concerns_us(message):
                        self._order = MembershipOrder(tuple(message["leaving"]))
                case "leave":
                    is_ours = self._is_spare and message["generation"] == self._generation
                    self._leaves = self._leaves or is_ours or self._concerns_us(message)
                case "reform":
                    # The new membership begins here, not in ``survive``: the next message may already end it.
                    self._begin(NextMembership.from_json(message["next"]))
                case "end":
                    self._ended = message["reason"]
                case other:
                    raise ControlError(f"unknown message {other!r} from the node's agent")
            self._changed.notify_all()
        # The lock is not held here: sending blocks while the agent is slow, and calls of the rank need the lock.
        if message["op"] == "ping":
            self._send({"op": "pong"})
        if abort is not None:
            _call_in_thread(abort, message["reason"])

    def _concerns_us(self, message: Message) -> bool:
        # Orders of earlier generations are ignored: they would abort the process groups of the present one.
        return self._rank is not None and message["generation"] == self._generation

    def _begin(self, following: NextMembership) -> None:
        rank = following.rank_on(self._identity.node, self._identity.local_rank)
        # For a rank that is joining or was a hot spare, both numbers are None.
        is_other = rank is not None and following.previous_ranks[rank] != self._rank
        if is_other or self._identity.node not in following.members:
            who = f"process {self._identity.number} (rank {self._rank} of generation {self._generation})"
            raise ControlError(f"{who} received a list of new ranks that does not contain it: {following.summary()}")
        self._rank, self._generation, self._is_spare = rank, following.generation, rank is None
        self._next.append(following)
        self._broken = self._order = None

    def _send(self, message: Record) -> None:
        try:
            with self._lock:
                send(self._socket, message)
        except OSError as error:
            raise ControlError(f"the node's agent is gone: {error}") from error


def _call_in_thread(abort: Abort, reason: str) -> None:
    # NCCL takes seconds to abort. In the listener's thread no ping would be answered meanwhile, and the agent would
    # kill the rank.
    threading.Thread(target=abort, args=(reason,), name="abort", daemon=True).start()


def _describe(error: BaseException | str) -> Record:
    if isinstance(error, str):
        return _failure(error, error.strip().splitlines()[-1] if error.strip() else "", None)
    # Only text is stored: an exception's frames keep process groups alive, which must not outlive the membership.
    own_code = error.exit_code if isinstance(error, MegatronFtError) else None
    last_line = "".join(traceback.format_exception_only(error)).strip()
    return _failure("".join(traceback.format_exception(error)), last_line, own_code)


def _failure(text: str, error: str, exit_code: int | None) -> Record:
    about = {"traceback": text[-_MAX_TRACEBACK:], "error": error[:_MAX_ERROR], "exit_code": exit_code}
    return {**about, "at_seconds": time.time()}

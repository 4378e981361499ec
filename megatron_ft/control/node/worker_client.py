"""A rank's side of the control plane: its context, its reports and the orders it receives."""

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.membership import NextMembership, Position

Record = dict[str, Any]

Abort = Callable[[str], None]
"""Function that aborts the collectives of a rank; its argument is the reason."""


@dataclass(frozen=True, slots=True)
class MembershipOrder:
    """The order to change the membership at the next iteration boundary. Joining nodes are not known yet."""

    leaving: tuple[int, ...]
    """Nodes whose ranks end normally at the boundary, ascending; empty when nodes only join."""


class WorkerClient(Protocol):
    """Calls of a rank to the control plane."""

    def report(self, record: Record) -> None:
        """Send a metrics or event record to the sinks. Blocks while the sinks are slow; nothing is dropped."""

    def progress(self, iteration: int, phase: str) -> None:
        """Report the present phase of the iteration; cheap enough to call in every phase."""

    def stop_requested(self) -> bool:
        """Whether to finish this iteration, write a checkpoint and return.

        Ranks see a request at slightly different moments, so the commit vote must decide after which iteration.
        """

    @property
    def can_survive(self) -> bool:
        """Whether this rank may continue when other nodes are lost, leave or join, see ``JobConfig.may_lose_nodes``."""

    def on_break(self, abort: Abort) -> None:
        """Register ``abort(reason)``, to be called when other ranks are lost, so that no collective waits for them.

        The function is called in another thread, at most once in each membership; without delay if ranks were lost
        before. It stays registered for later memberships until another function replaces it.
        """

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        """Report this rank's position after a failed iteration, and wait for the next membership.

        Args:
            position: position of this rank, with the rank's number in the membership that ends.
            error: the error of the iteration; if no node is lost, it counts as the rank's own failure.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this rank cannot survive.
        """

    def await_membership(self) -> NextMembership:
        """Wait on a joining node (``RankContext.is_joining``) for the first membership of this rank.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this node does not join.
        """

    def change_requested(self) -> bool:
        """Whether to leave the loop after this iteration, because nodes join or leave.

        Ranks see the request at slightly different moments, so the commit vote must decide after which iteration.
        """

    def awaited_change(self) -> MembershipOrder:
        """Wait for the order that makes ``change_requested`` true, and return it. Another rank may have received it
        earlier.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this rank cannot survive.
        """

    def change(self, position: Position) -> NextMembership | None:
        """Report that this rank has reached the boundary of a change, and wait for the next membership.

        Args:
            position: position of this rank, with the rank's number in the membership that ends.

        Returns:
            The next membership; None if this rank's node leaves: the rank must then return from its entry function.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this rank cannot survive.
        """

    def close(self) -> None:
        """Close the connection; no more messages are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Identity and environment of a rank. ``rank`` is global; ``generation`` counts memberships from 0."""

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
    """The run's ``checkpoints`` folder if the run continues from its newest valid state, as always after a restart
    (``generation`` > 0); None if training begins at iteration 0 or from ``checkpoint.load``."""
    worker: WorkerClient
    sidecars: Mapping[str, Any] = field(default_factory=dict)
    """Sidecars by name: ``socket`` (path on this node), ``token``, and ``addresses`` (node number as text to
    ``host:port``)."""
    nodes: tuple[int, ...] = ()
    """Node of each rank; these are fewer nodes than configured if some were lost before this start. Empty if unknown,
    as under torchrun."""
    is_joining: bool = False
    """Whether this process was started into a running job: before it joins any group it calls
    ``worker.await_membership()``, which gives its rank. Until then ``rank``, ``world_size``, ``num_nodes``, ``nodes``
    and the master describe the present membership, which this process does not belong to."""


class StopFlag:
    """A flag that signals set, so that a rank stops."""

    def __init__(self) -> None:
        self._requested = False

    def install(self, *signals: signal.Signals) -> None:
        """Let ``signals`` set the flag. Call this in the main thread."""
        for number in signals:
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        # Nothing else: a handler runs between any two instructions of the rank. The vote decides when to stop.
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
        """Do nothing: no agent reports losses."""

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        raise ControlError("a rank without an agent cannot survive the loss of another rank")

    def await_membership(self) -> NextMembership:
        raise ControlError("a rank without an agent cannot join a running job")

    def change_requested(self) -> bool:
        return False

    def awaited_change(self) -> MembershipOrder:
        raise ControlError("without an agent no node joins or leaves")

    def change(self, position: Position) -> NextMembership | None:
        raise ControlError("without an agent no node joins or leaves")

    def close(self) -> None:
        """See ``WorkerClient``."""

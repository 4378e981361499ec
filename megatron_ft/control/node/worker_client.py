"""A rank's side of the control plane: its context, its reports and the orders it receives."""

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position

Record = dict[str, Any]

Abort = Callable[[str], None]
"""Takes the reason."""


@dataclass(frozen=True, slots=True)
class MembershipOrder:
    """The order that the membership change at the next iteration boundary. The nodes that join are known afterwards."""

    leaving: tuple[int, ...]
    """Nodes whose ranks end well there, rising; empty when nodes only join."""


class WorkerClient(Protocol):
    """Calls of a rank to the control plane."""

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
        """Whether this rank may continue when others are lost, leave or join, see ``LaunchConfig.may_lose_nodes``."""

    def on_break(self, abort: Abort) -> None:
        """Have ``abort(reason)`` called when others are lost, so that no collective waits for them.

        It is called in another thread, once at most in each membership; at once if that has been broken already, and
        again in the next ones unless another takes its place.
        """

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        """Say how far this rank is when its iteration has failed, and wait for the next membership.

        Args:
            position: by this rank's number in the membership that ends.
            error: what the iteration failed with; the rank's own failure where no node is lost.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this rank cannot survive.
        """

    def await_membership(self) -> NextMembership:
        """Wait on a joining node (``RankContext.is_joining``) for the membership that this rank begins in.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this node does not join.
        """

    def change_requested(self) -> bool:
        """Whether to leave the loop after this iteration, for nodes join or leave.

        Ranks learn of it at slightly different moments: let the commit vote settle after which iteration.
        """

    def awaited_change(self) -> MembershipOrder:
        """The order behind ``change_requested``, which another rank may have known earlier: wait for it.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this rank cannot survive.
        """

    def change(self, position: Position) -> NextMembership | None:
        """Say that this rank stands at the boundary, and wait for the next membership.

        Args:
            position: by this rank's number in the membership that ends.

        Returns:
            None where this rank's node leaves: return from the rank's entry, which ends it well.

        Raises:
            ControlError: the job ends or starts its ranks again instead, or this rank cannot survive.
        """

    def close(self) -> None:
        """Say nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Identity and surroundings of a rank. ``rank`` is global; ``generation`` counts memberships from 0."""

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
    sidecars: Mapping[str, Any] = field(default_factory=dict)
    """Name of a service of the nodes to ``socket`` (path of its own node's), ``token``, and ``addresses`` (node number
    as text to ``host:port``)."""
    nodes: tuple[int, ...] = ()
    """Node of each rank: fewer nodes than the configuration has where some were lost before this start. Empty
    where it is unknown, as under torchrun."""
    is_joining: bool = False
    """This process was started into a job that runs: before it joins any group it calls
    ``worker.await_membership()``, which gives its rank. Until then ``rank``, ``world_size``, ``num_nodes``, ``nodes``
    and the master are those of the membership that it is not of."""


class StopFlag:
    """Set by the signals that ask a rank to stop."""

    def __init__(self) -> None:
        self._requested = False

    def install(self, *signals: signal.Signals) -> None:
        """Let ``signals`` set the flag. Main thread only."""
        for number in signals:
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        # Nothing else: a handler runs between any two instructions of the rank. The vote decides when to stop.
        self._requested = True

    def __bool__(self) -> bool:
        return self._requested


class InProcessClient:
    """``WorkerClient`` of a rank that has no agent: records go straight to ``write``."""

    def __init__(self, write: Callable[[Record], None], *, stop: StopFlag) -> None:
        self._write = write
        self._stop = stop
        self._lock = threading.Lock()

    def report(self, record: Record) -> None:
        with self._lock:
            self._write(record)

    def progress(self, iteration: int, phase: str) -> None:
        """Do nothing: no agent listens."""

    def stop_requested(self) -> bool:
        return bool(self._stop)

    @property
    def can_survive(self) -> bool:
        return False

    def on_break(self, abort: Abort) -> None:
        """Do nothing: no agent announces losses."""

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        raise ControlError("a rank without an agent does not outlive the others")

    def await_membership(self) -> NextMembership:
        raise ControlError("a rank without an agent does not join a job that runs")

    def change_requested(self) -> bool:
        return False

    def awaited_change(self) -> MembershipOrder:
        raise ControlError("a rank without an agent sees no node join or leave")

    def change(self, position: Position) -> NextMembership | None:
        raise ControlError("a rank without an agent sees no node join or leave")

    def close(self) -> None:
        """See ``WorkerClient``."""

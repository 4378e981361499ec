"""Lets a rank leave a wait for gloo after its connections have been shut down.

Gloo reports a closed connection to the operations that it has queued on it, with two exceptions: a receive whose header
has arrived while its payload is cut off, and a partly written send (``Pair::signalException`` in
``gloo/transport/tcp/pair.cc`` walks the queues, and such an operation is in none). A thread that waits for one of these
stays blocked until the timeout of its group, minutes later, although no byte can arrive any more.

``install`` replaces the two calls that can block a rank in this way: ``Work.wait``, with which every collective, send
and receive of ``torch.distributed`` ends, and the constructor of ``ProcessGroupGloo``, which connects to all other
ranks of a group. Both return or raise as before. In addition they raise ``WaitAbandoned`` after the ``WaitLimit`` in
use has ended. The operation itself may stay blocked in a thread; ``held_groups`` describes what happens to its group.

Memory: an abandoned operation keeps its tensors alive, because gloo's thread refers to them through the operation, so
no later allocation shares their memory. Bytes that it may still write there arrived before the connections were shut
down and are read within milliseconds. The content of such tensors is not used again, as in any failed iteration.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

GRACE_SECONDS = 0.5
"""Time between the shut-down of connections and the abandonment of waits; gloo nearly always fails them within 0.1
s."""
_SLICE = timedelta(seconds=0.1)
"""Time after which a wait checks the limit. Each check costs about 0.5 ms of CPU time."""

T = TypeVar("T")


class WaitAbandoned(RuntimeError):
    """A wait was abandoned although its operation has not ended. The process group of the operation cannot be used
    again."""


class WaitLimit:
    """Limit of the waits of one membership; there is none until ``end`` is called, from any thread."""

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self._grace_seconds = grace_seconds
        self._end: tuple[float, str] | None = None
        self.num_abandoned = 0
        """Number of waits that ``check`` has ended."""

    @property
    def is_ended(self) -> bool:
        """Whether ``end`` has been called."""
        return self._end is not None

    def end(self, reason: str) -> None:
        """Abandon remaining waits after the grace period. Only the first call counts."""
        # The grace period counts from the first report of the failure; later ones must not prolong it.
        if self._end is None:
            self._end = (time.monotonic() + self._grace_seconds, reason)

    def check(self) -> None:
        """Raise ``WaitAbandoned`` once the grace period has passed."""
        end = self._end
        if end is not None and time.monotonic() >= end[0]:
            self.num_abandoned += 1
            raise WaitAbandoned(
                f"an operation of gloo did not end within {self._grace_seconds:g} s after its connections were "
                f"shut down; the wait for it is abandoned ({end[1]})"
            )


class _Call(Generic[T]):
    """A call that a worker thread makes for another thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._is_done = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def make(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error
        self._is_done.set()

    def wait(self, limit: WaitLimit) -> T:
        while not self._is_done.wait(_SLICE.total_seconds()):
            limit.check()
        error, self._error = self._error, None
        if error is None:
            return self._result[0]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: both would live until the next garbage collection


class _Helper:
    """A thread that makes one call after another. If a call is abandoned, so is the thread, which ends after the
    call."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="gloo call", daemon=True).start()

    def call(self, function: Callable[[], T], limit: WaitLimit) -> T:
        call = _Call(function)
        self._calls.put(call)
        return call.wait(limit)

    def leave(self) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()
            del call  # it holds tensors


_in_use = WaitLimit()
_is_installed = False
_idle_helpers: list[_Helper] = []


def use(limit: WaitLimit) -> None:
    """Apply ``limit`` to all waits of this process that begin from now on."""
    global _in_use
    _in_use = limit


def in_use() -> WaitLimit:
    """Return the limit that applies to waits."""
    return _in_use


def call(function: Callable[[], T]) -> T:
    """Call ``function`` in a worker thread; return its result, or raise its error.

    For calls that block without a usable timeout: their thread cannot be woken, but it can be abandoned.

    Raises:
        WaitAbandoned: the limit in use has ended. ``function`` continues in its thread.
    """
    try:
        helper = _idle_helpers.pop()
    except IndexError:
        helper = _Helper()
    try:
        result = helper.call(function, _in_use)
    except WaitAbandoned:
        # Not returned to the idle ones: its thread may stay blocked for minutes.
        helper.leave()
        raise
    except BaseException:
        _idle_helpers.append(helper)
        raise
    _idle_helpers.append(helper)
    return result


def install() -> None:
    """Replace ``Work.wait`` and the constructor of ``ProcessGroupGloo`` in this process, as the module describes.

    Only for processes whose groups all use gloo. A second call does nothing.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    native_wait, native_init = dist.Work.wait, ProcessGroupGloo.__init__

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        """Wait for ``work``; see ``torch.distributed.Work.wait``."""
        if args or kwargs or work.is_completed():
            return native_wait(work, *args, **kwargs)
        # Taken once: a wait of an earlier membership must not get the limit of the next one.
        limit = _in_use
        try:
            work.get_future()
        except RuntimeError:
            # A send or a receive has no future. Its own timeout would close all connections of the group.
            return call(lambda: native_wait(work))
        while True:
            # The timeout of a collective's wait is that of a condition variable: its expiry changes nothing.
            try:
                return native_wait(work, _SLICE)
            except RuntimeError:
                if work.is_completed():  # it failed, or ended after the slice had expired
                    return native_wait(work)
            limit.check()

    def init(group: ProcessGroupGloo, *args: Any, **kwargs: Any) -> None:
        """Connect to all other ranks of a group; see ``torch.distributed.ProcessGroupGloo``."""
        call(lambda: native_init(group, *args, **kwargs))

    dist.Work.wait = wait  # type: ignore[method-assign]
    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]

"""Ends waits for gloo that would block a rank after its connections have been shut down.

When a connection closes, gloo fails the operations in its queues (``Pair::signalException`` in
``gloo/transport/tcp/pair.cc``). Two kinds of operations are in no queue: a receive whose header has arrived without its
payload, and a partly written send. A thread that waits for such an operation stays blocked until the timeout of its
group, minutes later.

``install`` replaces the two calls that can block a rank in this way: ``_Work.wait``, with which every collective, send
and receive of ``torch.distributed`` ends, and the constructor of ``ProcessGroupGloo``, which connects to all other
ranks of a group. Both return or raise as before. They also raise ``WaitAbandoned`` after the current ``WaitLimit`` has
ended. The operation itself may stay blocked in a thread; ``held_groups`` describes what happens to its group.

An abandoned operation references its tensors until it ends, so their memory is not allocated again. Within
milliseconds gloo may still write bytes to these tensors that arrived before the connections were shut down. This does
no harm, because the tensors of a failed iteration are not used again.
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
"""Time from the shutdown of connections until waits are abandoned. Gloo nearly always fails operations within 0.1 s."""
_SLICE = timedelta(seconds=0.1)
"""Interval at which a wait checks its limit. Each check costs about 0.5 ms of CPU time."""

T = TypeVar("T")


class WaitAbandoned(RuntimeError):
    """A wait was abandoned before its operation had ended. The process group of the operation cannot be used again."""


class WaitLimit:
    """Time limit of the waits of one membership. Waits are unlimited until any thread calls ``end``."""

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self._grace_seconds = grace_seconds
        self._end: tuple[float, str] | None = None
        self.num_abandoned = 0
        """Number of waits that ``check`` has abandoned."""

    @property
    def is_ended(self) -> bool:
        """Whether ``end`` has been called."""
        return self._end is not None

    def end(self, reason: str) -> None:
        """Let waits continue for the grace period, then abandon them because of ``reason``. Later calls have no effect,
        so that they do not prolong the grace period."""
        if self._end is None:
            self._end = (time.monotonic() + self._grace_seconds, reason)

    def check(self) -> None:
        """Raise ``WaitAbandoned`` if ``end`` has been called and the grace period is over."""
        end = self._end
        if end is not None and time.monotonic() >= end[0]:
            self.num_abandoned += 1
            raise WaitAbandoned(
                f"a gloo operation did not end within {self._grace_seconds:g} s after its connections were shut down, "
                f"so this rank no longer waits for it; reason of the shutdown: {end[1] or 'not given'}"
            )

    @classmethod
    def in_use(cls) -> "WaitLimit":
        """Return the limit of waits that begin now."""
        return _in_use

    def use(self) -> None:
        """Apply ``limit`` to all waits that begin in this process after this call."""
        global _in_use
        _in_use = self


class _Call(Generic[T]):
    """A function call that a worker thread makes for another thread."""

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
            del error  # the traceback of the error references this frame: a cycle until the next garbage collection


class _Helper:
    """A worker thread that makes one call after another. When a call is abandoned, the thread ends after this call."""

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
            del call  # the call references tensors


_in_use = WaitLimit()
_is_installed = False
_idle_helpers: list[_Helper] = []


def call(function: Callable[[], T]) -> T:
    """Call ``function`` in a worker thread. Return its result, or raise its error.

    Use it for functions that may block and have no usable timeout: a blocked worker thread can be abandoned.

    Raises:
        WaitAbandoned: the current limit has ended. ``function`` may still run in its thread.
    """
    try:
        helper = _idle_helpers.pop()
    except IndexError:
        helper = _Helper()
    try:
        result = helper.call(function, _in_use)
    except WaitAbandoned:
        # The helper is not used again, because its thread may stay blocked for minutes.
        helper.leave()
        raise
    except BaseException:
        _idle_helpers.append(helper)
        raise
    _idle_helpers.append(helper)
    return result


def install() -> None:
    """Replace ``_Work.wait`` and the constructor of ``ProcessGroupGloo`` in this process, as the module describes. All
    process groups of the process must use gloo. A second call does nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    native_wait, native_init = dist.Work.wait, ProcessGroupGloo.__init__

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        """Wait for ``work``; see ``torch.distributed.Work.wait``."""
        if args or kwargs or work.is_completed():
            return native_wait(work, *args, **kwargs)
        # Read only at the start: a wait of an earlier membership must not get the limit of the next one.
        limit = _in_use
        try:
            work.get_future()
        except RuntimeError:
            # Sends and receives have no future. They cannot wait in slices, because their timeout closes the group.
            return call(lambda: native_wait(work))
        while True:
            # A collective waits on a condition variable, so the expiry of this timeout does not affect the operation.
            try:
                return native_wait(work, _SLICE)
            except RuntimeError:
                if work.is_completed():  # the operation failed, or ended just after the timeout
                    return native_wait(work)
            limit.check()

    def init(group: ProcessGroupGloo, *args: Any, **kwargs: Any) -> None:
        """Connect to all other ranks of a group; see ``torch.distributed.ProcessGroupGloo``."""
        call(lambda: native_init(group, *args, **kwargs))

    dist.Work.wait = wait  # type: ignore[method-assign]
    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]

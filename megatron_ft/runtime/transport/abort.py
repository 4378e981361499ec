"""Ends collectives, waits and process groups of a failed membership at once, without an answer from lost ranks.

Gloo detects a lost peer when the connection to this peer closes. But if a rank waits for a healthy peer, and that peer
waits for the lost rank, the first rank stays blocked until its timeout. So each rank that learns of the failure shuts
down all its connections, which ends its own waits and those of its peers within milliseconds. ``Transports`` and
``Opening`` also end their ``WaitLimit``, so that operations which stay blocked in gloo are abandoned. ``release`` then
destroys the process groups.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

# The destructor of a gloo group joins the group's threads. A thread that is blocked in an abandoned operation (see
# ``WaitAbandoned``) ends only with the timeout of the group, minutes later. If the training thread destroyed the group,
# it would wait for this timeout. So a separate thread destroys each group. Until the destructor returns, the memory of
# the group, its operations and their tensors stays allocated. A process that exits does not wait for these threads.
#
# A group is destroyed when its last reference is dropped. A group with other references therefore stays in a list of
# this module until a later call of ``release`` finds no other reference.

_WAIT_SECONDS = 0.25
"""Longest time in seconds that ``release`` waits for threads which destroy groups. Most groups need less time."""

_holders: list[list[dist.ProcessGroup]] = []
"""Lists with one released process group each, which is not destroyed yet, because other objects reference it."""
_releasing: list[threading.Thread] = []


def num_held() -> int:
    """Return the number of process groups that were released but are not destroyed yet."""
    _releasing[:] = [thread for thread in _releasing if thread.is_alive()]
    return len(_releasing) + len(_holders)


def drop_broken_graph() -> None:
    """Free the graph of a backward pass that has raised in this thread.

    The engine of ``torch.autograd`` keeps its queued nodes until the next backward pass in the same thread. These nodes
    reference the graph, with its activations and the process groups of its collectives. Without this call, the backward
    pass of the next iteration would destroy the groups, and would wait for their blocked operations.
    """
    torch.zeros(1, requires_grad=True).sum().backward()


def release(groups: list[dist.ProcessGroup]) -> int:
    """Destroy the process groups in ``groups`` without waiting for blocked operations, and empty this list.

    A group that is still referenced elsewhere is destroyed by a later call, when no such reference is left.

    Returns:
        Number of groups that are not destroyed yet, including those of earlier calls.
    """
    while groups:
        _holders.append([groups.pop()])
    free = [holder for holder in _holders if _is_last_reference(holder)]
    _holders[:] = [holder for holder in _holders if all(holder is not other for other in free)]
    # The new thread drops the last reference, so the destructor runs there, without the interpreter's lock.
    threads = [threading.Thread(target=holder.clear, name="destroy a gloo group", daemon=True) for holder in free]
    del free
    _releasing.extend(threads)
    for thread in threads:
        thread.start()
    _await(threads)
    held = num_held()
    if held:
        used = f", {len(_holders)} of them because other objects reference them" if _holders else ""
        print(
            f"process groups that are not destroyed yet: {held}{used}; they keep their memory until they are destroyed",
            file=sys.stderr,
            flush=True,
        )
    return held


def _is_last_reference(holder: list[dist.ProcessGroup]) -> bool:
    return sys.getrefcount(holder[0]) == 2  # references of the list and of the argument


def _await(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


# When a connection closes, gloo fails the operations in its queues (``Pair::signalException`` in
# ``gloo/transport/tcp/pair.cc``). Two kinds of operations are in no queue: a receive whose header has arrived without
# its payload, and a partly written send. A thread that waits for such an operation stays blocked until the timeout of
# its group, minutes later.
#
# ``install`` replaces the two calls that can block a rank in this way: ``Work.wait``, with which every collective,
# send and receive of ``torch.distributed`` ends, and the constructor of ``ProcessGroupGloo``, which connects to all
# other ranks of a group. Both return or raise as before. They also raise ``WaitAbandoned`` after the current
# ``WaitLimit`` has ended. The operation itself may stay blocked in a thread; ``release`` describes what happens to
# its group.
#
# An abandoned operation references its tensors until it ends, so their memory is not allocated again. For a few
# milliseconds, gloo may still write to these tensors the bytes that arrived before the connections were shut down. This
# does no harm, because the tensors of a failed iteration are not used again.

GRACE_SECONDS = 0.5
"""Time in seconds from the shutdown of connections until waits are abandoned. In gloo, most waits fail within 0.1 s."""
_SLICE = timedelta(seconds=0.1)
"""Interval at which a wait checks whether its ``WaitLimit`` has ended. A check costs about 0.5 ms of CPU time."""

T = TypeVar("T")


class WaitAbandoned(RuntimeError):
    """Raised if a wait is abandoned before its operation has ended. The operation's process group is then unusable."""


class WaitLimit:
    """Time limit of waits in one membership (ranks that train together). Waits have no limit until a thread calls
    ``end``."""

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
        """Let waits continue for the grace period, then abandon them because of ``reason``. Later calls do nothing."""
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
        """Return the ``WaitLimit`` of waits that begin now: the one whose method ``use`` was called last."""
        return _in_use

    def use(self) -> None:
        """Apply this limit to all waits that begin in this process after this call."""
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
    """A worker thread that makes one call after another. If a call is abandoned, the thread ends when the call ends."""

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

    Use this for functions that may block and have no usable timeout. A blocked worker thread can be abandoned.

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
    """Replace torch's ``Work.wait`` and the constructor of ``ProcessGroupGloo``, so that both raise ``WaitAbandoned``
    after the current ``WaitLimit`` has ended. All process groups must use gloo. A second call does nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    native_wait, native_init = dist.Work.wait, ProcessGroupGloo.__init__

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        """Wait for ``work``; see ``torch.distributed.Work.wait``."""
        if args or kwargs or work.is_completed():
            return native_wait(work, *args, **kwargs)
        # The limit is read once: a wait of an earlier membership must not get the limit of the next one.
        limit = _in_use
        try:
            work.get_future()
        except RuntimeError:
            # Sends and receives have no future. They cannot wait in slices, because an expired wait closes the group.
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


_POLL_SECONDS = 0.02
"""Time in seconds between two searches for new connections."""
_SYN_SENT = 2
"""TCP state of a socket whose peer has not answered yet. Source: ``netinet/tcp.h``."""

SocketId = tuple[int, int]
"""Descriptor and inode of a socket. The inode is needed because a descriptor is reused after its socket is closed."""


def open_sockets() -> frozenset[SocketId]:
    """Return the ids (descriptor and inode) of all open sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found.add((int(name), int(inode.strip("[]"))))
    return frozenset(found)


class Transports:
    """TCP connections between this process and other ranks. Any thread can shut all of them down after a failure."""

    def __init__(self, sockets: Iterable[SocketId]) -> None:
        self._sockets = sorted(sockets)
        self._lock = threading.Lock()
        self._is_down = False
        self.limit = WaitLimit()
        """Time limit of waits for operations that use these connections."""

    @classmethod
    def among(cls, sockets: Iterable[SocketId], *, store_port: int | None) -> "Transports":
        """Select from ``sockets`` all TCP connections except those to torch's store, which has port ``store_port``."""
        return cls(found for found in sockets if _connects_ranks(found, store_port))

    def __len__(self) -> int:
        return len(self._sockets)

    def include(self, sockets: Iterable[SocketId]) -> None:
        """Add the TCP connections in ``sockets``. Shut them down at once if ``hang_up`` has been called."""
        connected = [found for found in sockets if _connects_ranks(found, None)]
        with self._lock:
            self._sockets += connected
            # After an earlier ``hang_up``, no other call would shut these connections down and end their waits.
            for found in connected if self._is_down else ():
                _shut_down(found)

    def hang_up(self, reason: str = "") -> None:
        """Shut down all connections and end their ``limit``, so that waits end. The error of an abandoned wait contains
        ``reason``. A second call does nothing."""
        # The limit ends first, because it must also apply to a wait that begins while sockets are shut down.
        self.limit.end(reason)
        with self._lock:
            if self._is_down:
                return
            self._is_down = True
            for found in self._sockets:
                _shut_down(found)


class Opening:
    """Connections that one thread of this process is making. Until ``close``, any other thread can call ``hang_up`` to
    shut them down after a failure."""

    def __init__(self) -> None:
        self._before = open_sockets()
        self._broken = threading.Event()
        self._closed = threading.Event()
        self._breaker: threading.Thread | None = None
        self._lock = threading.Lock()
        self.limit = WaitLimit()
        """Time limit of waits for these connections."""

    def hang_up(self, reason: str = "") -> None:
        """Shut down all TCP connections made between ``__init__`` and ``close``, and end ``limit``. Unanswered
        connection attempts are shut down too, because a dead machine never answers. The error of an abandoned wait
        contains ``reason``."""
        self.limit.end(reason)
        with self._lock:
            if self._breaker is None and not self._closed.is_set():
                self._broken.set()
                # A thread repeats this until ``close``, because gloo opens new sockets when an attempt fails.
                self._breaker = threading.Thread(target=self._break, name="break new connections", daemon=True)
                self._breaker.start()

    def pause(self, seconds: float) -> bool:
        """Wait ``seconds`` before another connection attempt. If ``hang_up`` was or is called, return True at once."""
        return self._broken.wait(seconds)

    def close(self) -> None:
        """End this object's work: connections made from now on are not shut down, even after ``hang_up``."""
        with self._lock:
            self._closed.set()
        if self._breaker is not None:
            self._breaker.join()

    def _break(self) -> None:
        down: set[SocketId] = set()
        is_over = False
        while not is_over:
            for found in open_sockets() - self._before - down:
                if _connects_ranks(found, None):
                    _shut_down(found)
                    down.add(found)
            is_over = self._closed.wait(_POLL_SECONDS)


def _connects_ranks(found: SocketId, store_port: int | None) -> bool:
    opened = _duplicate(found)
    if opened is None:
        return False
    with closing(opened):
        if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
            return False
        try:
            # No collective uses the connection to the store, which must stay usable.
            ports = {opened.getsockname()[1], opened.getpeername()[1]}
        except OSError:  # a listening socket, or the peer has not answered yet
            return opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _SYN_SENT
        return store_port not in ports


def _shut_down(found: SocketId) -> None:
    opened = _duplicate(found)
    if opened is not None:
        with closing(opened), suppress(OSError):  # the peer has closed it
            opened.shutdown(socket.SHUT_RDWR)


def _duplicate(found: SocketId) -> socket.socket | None:
    # Returns the socket with a new descriptor; None if it was closed, even if another file now has its old descriptor.
    descriptor, inode = found
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    # The copy is checked, because another thread may close the original descriptor and reuse it at any moment.
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return None
    return socket.socket(fileno=copy)

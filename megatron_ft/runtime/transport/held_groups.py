"""Destroys process groups without waiting for operations that are blocked in them.

The destructor of a gloo group joins the group's threads. A thread that is blocked in an abandoned operation (see
``waits``) ends only with the timeout of the group, minutes later. If the training thread destroyed the group, it would
wait for this timeout. So a separate thread destroys each group. Until the destructor returns, the memory of the group,
its operations and their tensors stays allocated. A process that exits does not wait for these threads.

A group is destroyed when its last reference is dropped. A group with other references therefore stays in a list of
this module until a later call of ``release`` finds no other reference.
"""

import sys
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_WAIT_SECONDS = 0.25
"""Longest time that ``release`` waits for its threads. Groups without blocked operations are destroyed in less."""

_holders: list[list[dist.ProcessGroup]] = []
"""Released groups that still have other references. Each inner list contains one group."""
_releasing: list[threading.Thread] = []


def num_held() -> int:
    """Return the number of released groups that are not destroyed yet."""
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
    """Empty the list ``groups``, and destroy its groups without waiting for blocked operations.

    Groups with other references are destroyed by a later call, when these references are gone.

    Returns:
        Number of all groups passed to this function so far that are not destroyed yet.
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
            f"process groups that are not destroyed yet: {held}{used}; their memory stays allocated until then",
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

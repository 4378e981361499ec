"""Releases process groups without waiting for operations that are blocked in them.

The destructor of a gloo group joins the group's threads. A thread that is blocked in an abandoned operation (see
``waits``) ends with the timeout of the group, minutes later; a rank that destroyed the group itself would be blocked
until then. So each group is destroyed in a separate thread. Until that thread has ended, it keeps the group, the group
keeps its operations, and these keep their tensors. A process that exits does not wait for such threads.

Dropping the last reference to a group destroys it. A group with other references is therefore kept, until a later call
of ``release`` finds no other reference.
"""

import sys
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_WAIT_SECONDS = 0.25
"""Longest wait for groups without blocked operations, whose threads end at once."""

_holders: list[list[dist.ProcessGroup]] = []
"""Groups with other references, each in a list of its own."""
_releasing: list[threading.Thread] = []


def num_held() -> int:
    """Return the number of groups that ``release`` was given and that are not destroyed yet."""
    _releasing[:] = [thread for thread in _releasing if thread.is_alive()]
    return len(_releasing) + len(_holders)


def drop_broken_graph() -> None:
    """Free the graph of a backward pass that has raised in this thread.

    The engine of ``torch.autograd`` keeps its queued nodes until its next backward pass in the same thread. These nodes
    keep the graph: activations, and the groups of its collectives. Without this call the next iteration would destroy
    the groups, and wait for their blocked operations.
    """
    torch.zeros(1, requires_grad=True).sum().backward()


def release(groups: list[dist.ProcessGroup]) -> int:
    """Destroy ``groups``, and kept groups without other references; empty the list. Does not wait for blocked
    operations.

    Returns:
        Number of groups of this process that are still kept, earlier ones included.
    """
    while groups:
        _holders.append([groups.pop()])
    free = [holder for holder in _holders if _is_last_reference(holder)]
    _holders[:] = [holder for holder in _holders if all(holder is not other for other in free)]
    # A group's destructor runs without the interpreter's lock.
    # The thread drops the last reference, so that the destructor runs there and not in this thread.
    threads = [threading.Thread(target=holder.clear, name="destroy a gloo group", daemon=True) for holder in free]
    del free
    _releasing.extend(threads)
    for thread in threads:
        thread.start()
    _await(threads)
    held = num_held()
    if held:
        used = f"; {len(_holders)} of them are still referenced" if _holders else ""
        print(
            f"{held} process groups cannot be destroyed: their operations have not ended{used}",
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

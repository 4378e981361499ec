"""Releases process groups without waiting for operations that are still blocked in them.

The destructor of a gloo group joins the group's threads. A thread that is blocked in an abandoned operation (see
``waits``) ends with the timeout of the group, minutes later, and a rank that destroyed the group itself would be
blocked for as long. So each group is destroyed in a thread of its own. Until that thread has ended, it holds the group,
the group holds its operations, and these hold their tensors. A process that exits does not wait for such threads.
"""

import sys
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

_PATIENCE_SECONDS = 0.25
"""That a rank waits for groups without blocked operations, whose threads end at once."""

_releasing: list[threading.Thread] = []


def num_held() -> int:
    """Groups that ``release`` was given and that are not destroyed yet."""
    _releasing[:] = [thread for thread in _releasing if thread.is_alive()]
    return len(_releasing)


def release(groups: list[dist.ProcessGroup]) -> int:
    """Destroy ``groups``, to which the caller holds the last references, and empty the list.

    It returns after a short time also where operations are blocked in them.

    Returns:
        Groups of this process that are held, these and earlier ones.
    """
    threads = []
    while groups:
        holder = [groups.pop()]
        # Only the list refers to the group from here on. Its destructor runs without the interpreter's lock.
        threads.append(threading.Thread(target=holder.clear, name="destroy a gloo group", daemon=True))
        del holder
    _releasing.extend(threads)
    for thread in threads:
        thread.start()
    _await(threads)
    held = num_held()
    if threads and held:
        print(f"{held} process groups are held: operations in them have not ended", file=sys.stderr, flush=True)
    return held


def _await(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

"""Disconnects and reconnects a node with a network namespace of its own.

A node is reached through pairs of virtual links, see veth(4): one end is in its namespace, the other one here. Taking
the ends here down is like pulling a cable: in the node links have no carrier; packets of open connections and of new
ones vanish without an answer. Processes that share this process's namespace cannot be disconnected this way.
"""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ft.errors import ControlError

_COMMAND_SECONDS = 10.0


class CannotCut(ControlError):
    """A node's network cannot be disconnected from here; the message gives the reason."""


def links_to(process_ids: Iterable[int]) -> list[str]:
    """List the ends in this process's network namespace of all links that lead to the namespaces of the processes.

    Raises:
        CannotCut: a process shares this namespace or has ended, no link leads there from here, or the programs ``ip``
            and ``nsenter`` are missing or not allowed.
    """
    here = os.readlink("/proc/self/ns/net")
    far: set[int] = set()
    for process_id in process_ids:
        try:
            there = os.readlink(f"/proc/{process_id}/ns/net")
        except OSError as error:
            raise CannotCut(f"process {process_id}: its network namespace cannot be read: {error.strerror}") from None
        # To cut this process's own network would cut all nodes that share it, and the injector.
        if there == here:
            raise CannotCut(
                f"process {process_id} is in the same network namespace as this process: its network cannot be "
                "cut alone"
            )
        inside = ["nsenter", f"--net=/proc/{process_id}/ns/net"]
        found = {link["link_index"] for link in _links(inside) if "link_index" in link}
        if not found:
            raise CannotCut(f"process {process_id}: no veth link leads to its network namespace")
        far |= found
    names = [link["ifname"] for link in _links() if link["ifindex"] in far]
    # A link whose other end is elsewhere stays up: the node would be cut off in part.
    if len(names) < len(far):
        raise CannotCut(
            f"{len(far) - len(names)} of {len(far)} links of the nodes lead to another network namespace than this one"
        )
    return sorted(names)


def switch(links: Sequence[str], *, on: bool) -> None:
    """Take these links up or down; continue with the others if one fails. Raises CannotCut."""
    failed = []
    for name in links:
        try:
            _run(["ip", "link", "set", name, "up" if on else "down"])
        except CannotCut as error:
            failed.append(str(error))
    if failed:
        raise CannotCut("; ".join(failed))


def _links(inside: Sequence[str] = ()) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_run([*inside, "ip", "-json", "link", "show", "type", "veth"]) or "[]")
    return [link for link in found if link]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCut(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise CannotCut(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout

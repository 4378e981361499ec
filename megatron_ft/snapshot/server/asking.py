"""Questions to other nodes' keepers, each over a connection of its own."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.snapshot.server.fields import MAX_BYTES, integer, items, mapping, stored_window
from megatron_ft.snapshot.server.memory import Memory, Segment
from megatron_ft.snapshot.server.wire import connect

_MAX_AT_ONCE = 16


def ask_inventories(peers: Mapping[int, str], greeting: Message, rank: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask all ``peers`` what they hold of ``rank``: entries of inventories, and why peers did not answer."""

    def ask(peer: tuple[int, str]) -> tuple[list[dict[str, Any]], list[str]]:
        try:
            wire, _ = connect(peer[1], greeting)
            try:
                found = items(wire.call({"op": "inventory", "rank": rank}), "windows")
                return [asdict(stored_window(entry)) for entry in found], []
            finally:
                wire.close()
        except (ControlError, OSError) as error:
            return [], [f"node {peer[0]}: {error}"]

    if not peers:
        return [], []
    with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(peers))) as pool:
        answers = list(pool.map(ask, sorted(peers.items())))
    return [window for found, _ in answers for window in found], [one for _, problems in answers for one in problems]


def fetch_window(address: str, greeting: Message, request: Message, memory: Memory) -> tuple[Segment, dict[str, Any]]:
    """A window that another keeper holds, in memory of its own, and its description. Nothing is verified here.

    Raises:
        ControlError, OSError: it is not there, or does not arrive.
    """
    wire, _ = connect(address, greeting)
    try:
        answer = wire.call({**request, "op": "fetch"})
        num_bytes = integer(answer, "num_bytes", most=MAX_BYTES)
        segment = memory.allocate("fetched", max(1, num_bytes))
        wire.send({"op": "go"})
        wire.receive_into(segment.view[:num_bytes])
        return segment, mapping(answer, "window")
    finally:
        wire.close()

"""A job of the ranks of ``payload_ranks`` that loses nodes: kills them, and plays their agents and the controller.

It orders the others to break and begins the next membership when all have reported.
"""

import multiprocessing
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.payload_ranks import be
from megatron_ft.control.ports import free_port
from megatron_ft.framing import FrameReader, Message, send
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Target


class PayloadJob:
    """A job of nodes of one rank each, forked from this process."""

    def __init__(self, num_nodes: int, folder: Path) -> None:
        self._path = str(folder / "agent")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(num_nodes)
        self._selector = selectors.DefaultSelector()
        self._generation = 0
        self.nodes = tuple(range(num_nodes))
        """Nodes with living ranks, rising."""
        self._readers: dict[int, FrameReader] = {}
        fork = multiprocessing.get_context("fork")
        first = self._membership(tuple(range(num_nodes)))
        self._processes: dict[int, BaseProcess] = {}
        self._killed: list[BaseProcess] = []
        for node in self.nodes:
            process = fork.Process(target=be, args=(node, self._path, first))
            process.start()
            self._processes[node] = process
        for _ in self.nodes:
            reader = FrameReader(self._listener.accept()[0])
            messages, _ = reader.pump()
            node = messages[0]["rank"]
            self._readers[node] = reader
            self._selector.register(reader.sock, selectors.EVENT_READ, node)

    @property
    def process_ids(self) -> list[int]:
        """List process ids of the living ranks."""
        return [process.pid or 0 for process in self._processes.values()]

    def await_records(self, kind: str, limit_seconds: float) -> dict[int, Message]:
        """The record of this kind and generation from every node that lives.

        Raises:
            TimeoutError: a node sends none.
        """

        def found(message: Message) -> bool:
            record = message.get("record", {})
            return record.get("kind") == kind and record.get("generation") == self._generation - (kind == "broke")

        return {node: message["record"] for node, (_, message) in self._await(found, limit_seconds).items()}

    def await_operation(self, number: int, limit_seconds: float) -> None:
        """Return when the first node begins its operation ``number`` in this membership.

        Raises:
            TimeoutError: no node begins it.
        """
        self._await(
            lambda message: message["op"] == "progress" and message["iteration"] >= number, limit_seconds, num_nodes=1
        )

    def kill(self, node: int) -> float:
        """Kill a node; the moment by the machine's monotonic clock."""
        process = self._processes.pop(node)
        at_seconds = time.monotonic()
        os.kill(process.pid or 0, signal.SIGKILL)
        self._killed.append(process)  # the kernel may take half a second to free its memory
        self._selector.unregister(self._readers[node].sock)
        self._readers.pop(node).sock.close()
        self.nodes = tuple(other for other in self.nodes if other != node)
        return at_seconds

    def break_off(self, reason: str) -> None:
        """Order all to abandon what they do."""
        self._order({"op": "break", "generation": self._generation, "reason": reason})

    def await_reports(self, limit_seconds: float) -> dict[int, float]:
        """Return the time at which each living node has reported its progress.

        Raises:
            TimeoutError: a node does not report.
        """
        reports = self._await(lambda message: message["op"] == "broken", limit_seconds)
        return {node: at_seconds for node, (at_seconds, _) in reports.items()}

    def reform(self, before: tuple[int, ...]) -> None:
        """Begin the next membership, of the nodes that live; ``before`` are those of the one that ends."""
        self._generation += 1
        self._order({"op": "reform", "next": self._membership(before).to_json()})

    def end(self, limit_seconds: float) -> float:
        """Break the membership, have all ranks report and exit; seconds until the last of them is gone.

        Raises:
            TimeoutError: a rank stays.
        """
        self.break_off("the job ends")
        self.await_reports(limit_seconds)
        began = time.monotonic()
        self._order({"op": "end", "reason": "the job ends"})
        for node, process in self._processes.items():
            process.join(limit_seconds)
            if process.exitcode != 0:
                raise TimeoutError(f"the rank of node {node} ends with {process.exitcode}")
        return time.monotonic() - began

    def close(self) -> None:
        """Leave nothing behind."""
        for process in (*self._processes.values(), *self._killed):
            process.kill()
            process.join()
        for reader in self._readers.values():
            reader.sock.close()
        self._selector.close()
        self._listener.close()

    def _membership(self, before: tuple[int, ...]) -> NextMembership:
        return NextMembership(
            generation=self._generation,
            previous_ranks=tuple(before.index(node) for node in self.nodes),
            nodes=self.nodes,
            target=Target(iteration=0, vote=None),
            master_addr="127.0.0.1",
            master_port=free_port("127.0.0.1"),
            reason="",
        )

    def _order(self, message: Mapping[str, Any]) -> None:
        for node in self.nodes:
            send(self._readers[node].sock, dict(message))

    def _await(
        self, wanted: Callable[[Message], bool], limit_seconds: float, num_nodes: int | None = None
    ) -> dict[int, tuple[float, Message]]:
        """Receive the first matching message of each living node, and its time; others are dropped.

        Args:
            num_nodes: nodes to wait for; None for all living ones.
        """
        found: dict[int, tuple[float, Message]] = {}
        deadline = time.monotonic() + limit_seconds
        while len(found) < (len(self.nodes) if num_nodes is None else num_nodes):
            missing = set(self.nodes) - set(found)
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"nodes {sorted(missing)} say nothing for {limit_seconds:g} s")
            for key, _ in ready:
                messages, closed = self._readers[key.data].pump()
                at_seconds = time.monotonic()
                found.update((key.data, (at_seconds, message)) for message in messages if wanted(message))
                if closed:
                    raise TimeoutError(f"the rank of node {key.data} is gone")
        return found

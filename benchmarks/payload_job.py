"""Runs a job of the ranks of ``payload_ranks``, kills some of them, and plays the agents and the controller. After a
kill, it orders the other ranks to abandon their operations. When all have reported, it begins the next membership.
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
from megatron_ft.planning.recovery.membership import NextMembership, Target


class PayloadJob:
    """Job of nodes with one rank each. The ranks are forked from this process."""

    def __init__(self, num_nodes: int, folder: Path) -> None:
        self._path = str(folder / "agent")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(num_nodes)
        self._selector = selectors.DefaultSelector()
        self._generation = 0
        self.nodes = tuple(range(num_nodes))
        """Nodes whose ranks are alive, in rising order."""
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
        """Return the process ids of the living ranks."""
        return [process.pid or 0 for process in self._processes.values()]

    def await_records(self, kind: str, limit_seconds: float) -> dict[int, Message]:
        """Return from every living node its record of this kind and generation.

        Raises:
            TimeoutError: a node sent no such record.
        """

        def found(message: Message) -> bool:
            record = message.get("record", {})
            return record.get("kind") == kind and record.get("generation") == self._generation - (kind == "broke")

        return {node: message["record"] for node, (_, message) in self._await(found, limit_seconds).items()}

    def await_operation(self, number: int, limit_seconds: float) -> None:
        """Wait until the first node begins operation ``number`` of this membership.

        Raises:
            TimeoutError: no node began it in time.
        """
        self._await(
            lambda message: message["op"] == "progress" and message["iteration"] >= number, limit_seconds, num_nodes=1
        )

    def kill(self, node: int) -> float:
        """Kill a node. Return the time by the monotonic clock."""
        process = self._processes.pop(node)
        at_seconds = time.monotonic()
        os.kill(process.pid or 0, signal.SIGKILL)
        self._killed.append(process)  # the kernel may take half a second to free its memory
        self._selector.unregister(self._readers[node].sock)
        self._readers.pop(node).sock.close()
        self.nodes = tuple(other for other in self.nodes if other != node)
        return at_seconds

    def break_off(self, reason: str) -> None:
        """Order all ranks to abandon their operations."""
        self._order({"op": "break", "generation": self._generation, "reason": reason})

    def await_reports(self, limit_seconds: float) -> dict[int, float]:
        """Return the time at which each living node has reported its progress.

        Raises:
            TimeoutError: a node did not report in time.
        """
        reports = self._await(lambda message: message["op"] == "broken", limit_seconds)
        return {node: at_seconds for node, (at_seconds, _) in reports.items()}

    def reform(self, before: tuple[int, ...]) -> None:
        """Begin the next membership, of the living nodes. ``before`` are the nodes of the previous membership."""
        self._generation += 1
        self._order({"op": "reform", "next": self._membership(before).to_json()})

    def end(self, limit_seconds: float) -> float:
        """End the job: break the membership, and wait until all ranks have reported and exited. Return the seconds
        until the last exit.

        Raises:
            TimeoutError: a rank did not exit in time.
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
        """Kill all processes and close all connections that remain."""
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
        """Receive the first matching message of each living node, and its time. Other messages are dropped.

        Args:
            num_nodes: Number of nodes to wait for; None for all living nodes.
        """
        found: dict[int, tuple[float, Message]] = {}
        deadline = time.monotonic() + limit_seconds
        while len(found) < (len(self.nodes) if num_nodes is None else num_nodes):
            missing = set(self.nodes) - set(found)
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"nodes {sorted(missing)} sent no such message for {limit_seconds:g} s")
            for key, _ in ready:
                messages, closed = self._readers[key.data].pump()
                at_seconds = time.monotonic()
                found.update((key.data, (at_seconds, message)) for message in messages if wanted(message))
                if closed:
                    raise TimeoutError(f"the rank of node {key.data} has ended")
        return found

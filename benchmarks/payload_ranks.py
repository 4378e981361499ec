"""Ranks that keep large payloads in flight through the project's groups, and a job of them that loses nodes.

What a rank does is the product's: groups, waits that can be abandoned, the shut-down of connections, the report over
``AgentClient``, the release of groups and the next membership. ``PayloadJob`` stands for the agents and the controller:
it kills a rank, orders the others to break and begins the next membership when all have reported.
"""

import multiprocessing
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.config.parallel import ParallelConfig
from megatron_ft.control.agent_client import AgentClient, Identity
from megatron_ft.control.ports import free_port
from megatron_ft.control.worker import RankContext, StopFlag
from megatron_ft.errors import ControlError
from megatron_ft.framing import FrameReader, Message, send
from megatron_ft.mcore.groups import Groups, dissolve_groups, form_groups, open_store
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position, Target
from megatron_ft.runtime.transport import held_groups, waits
from megatron_ft.runtime.transport.hang_up import Opening, open_sockets

NUM_ELEMENTS = 60 * 279_621
"""Of float32 in a payload: a little over 64 MiB, and divisible by 2 to 6 ranks."""
GROUP_TIMEOUT_SECONDS = 120.0
"""Until gloo itself ends an operation that it has forgotten."""
FORM_SECONDS = 60.0
STRIDE = 3
"""Operations by which each membership begins later in their order than the one before."""
_BYTES_RECEIVED = slice(128, 136)
"""In ``tcp_info``. Source: ``linux/tcp.h``."""


class Payloads:
    """The operations of one membership, one after the other, each of one payload or more, with tensors of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size, self._me = group, group.size(), group.rank()
        self._one, self._other = torch.ones(NUM_ELEMENTS), torch.empty(NUM_ELEMENTS)
        self._share = NUM_ELEMENTS // self._size
        self.operations: tuple[Callable[[], None], ...] = (
            self.all_reduce,
            self.neighbours,
            self.all_to_all,
            self.broadcast,
            self.reduce_scatters,
            self.neighbours,
            self.all_gathers,
            self.overlapped,
        )

    def all_reduce(self) -> None:
        self._one.fill_(1.0)
        dist.all_reduce(self._one, group=self._group)
        assert float(self._one[-1]) == self._size, "ranks of another membership have taken part"

    def all_to_all(self) -> None:
        dist.all_to_all_single(self._other, self._one, group=self._group)

    def reduce_scatters(self) -> None:
        self._begin_reduce_scatters().wait()

    def broadcast(self) -> None:
        dist.broadcast(self._other, group=self._group, group_src=self._size - 1)

    def all_gathers(self) -> None:
        inputs = (self._one[: self._share], self._one[self._share : 2 * self._share])
        outputs = (self._other, torch.empty(NUM_ELEMENTS))
        with dist._coalescing_manager(group=self._group, async_ops=True) as works:
            for output, own in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(output, own, group=self._group)
        works.wait()

    def neighbours(self) -> None:
        """Send to the next rank and receive from the previous one, as pipeline stages do."""
        following, previous = (self._me + 1) % self._size, (self._me - 1) % self._size
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._one, group=self._group, group_peer=following),
                dist.P2POp(dist.irecv, self._other, group=self._group, group_peer=previous),
            ]
        ):
            work.wait()

    def overlapped(self) -> None:
        """Reduce-scatters in the background of an all-to-all, as in a backward pass."""
        works = self._begin_reduce_scatters()
        dist.all_to_all_single(self._other, torch.ones(NUM_ELEMENTS), group=self._group)
        works.wait()

    def _begin_reduce_scatters(self) -> Any:
        with dist._coalescing_manager(group=self._group, async_ops=True) as works:
            for _ in range(2):
                dist.reduce_scatter_tensor(torch.empty(self._share), torch.ones(NUM_ELEMENTS), group=self._group)
        return works


class _Traffic:
    """Bytes that the connections of one membership have received. It keeps them open beyond gloo's own use."""

    def __init__(self, before: frozenset[tuple[int, int]]) -> None:
        opened = [socket.socket(fileno=os.dup(number)) for number, _ in open_sockets() - before]
        self._sockets = [one for one in opened if _is_connected(one)]
        for one in opened:
            if one not in self._sockets:
                one.close()

    def received(self) -> int:
        infos = (one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for one in self._sockets)
        return sum(int.from_bytes(info[_BYTES_RECEIVED], sys.byteorder) for info in infos)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _is_connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return one.family in (socket.AF_INET, socket.AF_INET6)


class _Rank:
    """One rank, in its own process."""

    def __init__(self, number: int, path: str) -> None:
        identity = Identity(number=number, rank=number, node=number, local_rank=0, generation=0, start=0)
        self._number = number
        self._worker = AgentClient(path, identity, stop=StopFlag(), can_survive=True)
        self._iteration = 0

    def live(self, first: NextMembership) -> None:
        """Train in one membership after the other until the job ends.

        Raises:
            ControlError: it has ended.
        """
        waits.install()
        following = first
        while True:
            failure, about = self._attempt(following)
            rank = following.rank_on(self._number, 0)
            assert rank is not None, "this rank is of the membership"
            position = Position(
                rank=rank,
                generation=following.generation,
                completed=self._iteration,
                contributed=self._iteration,
                vote=None,
            )
            following = self._worker.survive(position, failure)
            began = time.monotonic()
            dissolve_groups()
            seconds = time.monotonic() - began
            self._worker.report({**about, "release_seconds": seconds, "num_held": held_groups.num_held()})

    def _attempt(self, following: NextMembership) -> tuple[str, dict[str, Any]]:
        """Run operations until one fails: its traceback, and what it was. No group is referred to afterwards."""
        before = open_sockets()
        groups = self._form(following)
        traffic, payloads = _Traffic(before), Payloads(groups.pg_collection.dp)
        hang_up, limit = groups.transports.hang_up, groups.transports.limit
        self._worker.on_break(hang_up)
        began, received = time.monotonic(), 0
        operation = payloads.all_reduce
        try:
            operation()
            self._worker.report({"kind": "went_on", "generation": following.generation})
            for number in count():
                operation = payloads.operations[(STRIDE * following.generation + number) % len(payloads.operations)]
                began, received = time.monotonic(), traffic.received()
                self._worker.progress(number, operation.__name__)
                operation()
                self._iteration += 1
        except RuntimeError:
            failure = traceback.format_exc()
        hang_up("this rank's operation failed")
        about = {
            "kind": "broke",
            "generation": following.generation,
            "operation": operation.__name__,
            "began": began,
            "num_received_bytes": traffic.received() - received,
            "num_abandoned": limit.num_abandoned,
        }
        traffic.close()
        return failure, about

    def _form(self, following: NextMembership) -> Groups:
        rank = following.rank_on(self._number, 0)
        assert rank is not None, "this rank is of the membership"
        context = RankContext(
            rank=rank,
            world_size=following.world_size,
            local_rank=0,
            node=self._number,
            num_nodes=following.world_size,
            generation=following.generation,
            master_addr=following.master_addr,
            master_port=following.master_port,
            run_dir=Path(),
            resume_from=None,
            worker=self._worker,
        )
        opening = Opening()
        waits.use(opening.limit)
        self._worker.on_break(opening.hang_up)
        try:
            return form_groups(
                ParallelConfig(),
                store=open_store(context, timeout_seconds=FORM_SECONDS, opening=opening),
                rank=rank,
                world_size=following.world_size,
                generation=following.generation,
                device="cpu",
                timeout_seconds=GROUP_TIMEOUT_SECONDS,
            )
        finally:
            opening.close()


def _be(number: int, path: str, first: NextMembership) -> None:
    code = 1
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        _Rank(number, path).live(first)
    except ControlError:
        code = 0  # the job has ended: as a rank of the product, this one leaves without waiting for what is held
    except BaseException:  # noqa: BLE001 - a rank's last words
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


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
        """Whose ranks live, rising."""
        self._readers: dict[int, FrameReader] = {}
        fork = multiprocessing.get_context("fork")
        first = self._membership(tuple(range(num_nodes)))
        self._processes: dict[int, BaseProcess] = {}
        for node in self.nodes:
            process = fork.Process(target=_be, args=(node, self._path, first))
            process.start()
            self._processes[node] = process
        for _ in self.nodes:
            reader = FrameReader(self._listener.accept()[0])
            messages, _ = reader.pump()
            node = messages[0]["rank"]
            self._readers[node] = reader
            self._selector.register(reader.sock, selectors.EVENT_READ, node)

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
        process.join()
        self._selector.unregister(self._readers[node].sock)
        self._readers.pop(node).sock.close()
        self.nodes = tuple(other for other in self.nodes if other != node)
        return at_seconds

    def break_off(self, reason: str) -> None:
        """Order all to abandon what they do."""
        self._order({"op": "break", "generation": self._generation, "reason": reason})

    def await_reports(self, limit_seconds: float) -> dict[int, float]:
        """When each node that lives has reported how far it is.

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
        for process in self._processes.values():
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
        """For each node that lives the first message that is wanted, and when it came; others are dropped.

        Args:
            num_nodes: nodes to wait for; None for all that live.
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

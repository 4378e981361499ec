"""Ranks that keep large payloads in flight through the project's process groups.

A rank runs the project's code that forms and releases groups, abandons waits, closes connections, reports through
``AgentClient`` and forms the next membership. ``payload_job`` takes the place of agents and controller.
"""

import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.config.job import ParallelConfig
from megatron_ft.control.node.worker_client import AgentClient, Identity, RankContext, StopFlag
from megatron_ft.errors import ControlError
from megatron_ft.mcore.groups import Groups, dissolve_groups, open_store
from megatron_ft.planning.recovery.membership import NextMembership, Position
from megatron_ft.runtime.transport import abort
from megatron_ft.runtime.transport.abort import Opening, open_sockets

NUM_ELEMENTS = 60 * 279_621
"""Number of float32 values in a payload: slightly more than 64 MiB, and divisible by 2 to 6 ranks."""
GROUP_TIMEOUT_SECONDS = 120.0
"""Timeout of gloo, which ends an operation that would otherwise wait forever."""
FORM_SECONDS = 60.0
STRIDE = 3
"""Each membership begins this many operations later in the list of operations than the previous membership."""
_BYTES_RECEIVED = slice(128, 136)
"""Position of the number of received bytes in ``tcp_info`` (``linux/tcp.h``)."""


class Payloads:
    """Operations of one membership. They run one after the other, each with one or more payloads and with its own
    tensors."""

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
        """Run reduce-scatters in the background of an all-to-all, as in a backward pass."""
        works = self._begin_reduce_scatters()
        dist.all_to_all_single(self._other, torch.ones(NUM_ELEMENTS), group=self._group)
        works.wait()

    def _begin_reduce_scatters(self) -> Any:
        with dist._coalescing_manager(group=self._group, async_ops=True) as works:
            for _ in range(2):
                dist.reduce_scatter_tensor(torch.empty(self._share), torch.ones(NUM_ELEMENTS), group=self._group)
        return works


class _Traffic:
    """Counts the bytes that the connections of one membership have received. It keeps the connections open after gloo
    has closed them."""

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
    """Rank in its own process."""

    def __init__(self, number: int, path: str) -> None:
        identity = Identity(number=number, rank=number, node=number, local_rank=0, generation=0, start=0)
        self._number = number
        self._worker = AgentClient(path, identity, stop=StopFlag(), can_survive=True)
        self._iteration = 0

    def live(self, first: NextMembership) -> None:
        """Run operations in one membership after the other until the job ends.

        Raises:
            ControlError: the job has ended.
        """
        abort.install()
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
            self._worker.report({**about, "release_seconds": seconds, "num_held": abort.num_held()})

    def _attempt(self, following: NextMembership) -> tuple[str, dict[str, Any]]:
        """Run operations until one fails. Return the traceback and a description of this operation. Afterwards nothing
        refers to a process group."""
        before = open_sockets()
        groups = self._form(following)
        traffic, payloads = _Traffic(before), Payloads(groups.pg_collection.dp)
        transports, ordered = groups.transports, []

        def hang_up(reason: str) -> None:
            ordered.append(time.monotonic())
            transports.hang_up(reason)

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
            left, failure = time.monotonic(), traceback.format_exc()
        hang_up("this rank's operation failed")
        about = {
            "kind": "broke",
            "generation": following.generation,
            "operation": operation.__name__,
            "began": began,
            "ordered": ordered[0],
            "left": left,
            "num_received_bytes": traffic.received() - received,
            "num_abandoned": transports.limit.num_abandoned,
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
        opening.limit.use()
        self._worker.on_break(opening.hang_up)
        try:
            return Groups.form(
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


def be(number: int, path: str, first: NextMembership) -> None:
    """Act as rank ``number`` of a job, beginning with membership ``first``. Ends the process."""
    code = 1
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        _Rank(number, path).live(first)
    except ControlError:
        code = 0  # the job has ended; like a real rank, this rank exits without waiting for blocked operations
    except BaseException:  # noqa: BLE001 - a rank's last words
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)

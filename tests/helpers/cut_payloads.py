"""Runs operations of two gloo ranks, of which one is killed in the middle of the payload that the other receives.

``python -m tests.helpers.cut_payloads OUTCOME`` imports torch once, forks the ranks of one operation after the other,
and writes what each survivor observed. Rank 1 sends slowly, because the kernel limits the rate of its sockets. It is
killed when rank 0 reports that it has received a part of the payload.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.control.ports import free_port
from megatron_ft.runtime.transport import abort
from megatron_ft.runtime.transport.abort import SocketId, Transports, open_sockets

NUM_ELEMENTS = 16 << 20
"""Number of float32 elements in each direction: 64 MiB."""
GROUP_TIMEOUT_SECONDS = 30.0
_PACE_BYTES_PER_SECOND = 16 << 20
_CUT_BYTES = 1 << 20
"""Number of bytes that the survivor has received when the victim is killed."""
_SO_MAX_PACING_RATE = 47
_BYTES_RECEIVED = slice(128, 136)
"""Position of the number of received bytes in ``tcp_info``. Source: ``linux/tcp.h``."""


def _all_reduce() -> None:
    dist.all_reduce(torch.ones(NUM_ELEMENTS))


def _all_to_all() -> None:
    sent, received = (0, NUM_ELEMENTS) if dist.get_rank() == 0 else (NUM_ELEMENTS, 0)
    dist.all_to_all_single(torch.empty(received), torch.ones(sent), [0, received], [sent, 0])  # to rank 0 alone


def _broadcast() -> None:
    dist.broadcast(torch.ones(NUM_ELEMENTS), 1)


def _reduce_scatter() -> None:
    dist.reduce_scatter_tensor(torch.empty(NUM_ELEMENTS // 2), torch.ones(NUM_ELEMENTS))


def _coalesced_reduce_scatters() -> None:
    with dist._coalescing_manager(async_ops=True) as works:
        for _ in range(2):
            dist.reduce_scatter_tensor(torch.empty(NUM_ELEMENTS // 4), torch.ones(NUM_ELEMENTS // 2))
    works.wait()


def _all_gather() -> None:
    dist.all_gather_into_tensor(torch.empty(2 * NUM_ELEMENTS), torch.ones(NUM_ELEMENTS))


def _coalesced_all_gathers() -> None:
    with dist._coalescing_manager(async_ops=True) as works:
        for _ in range(2):
            dist.all_gather_into_tensor(torch.empty(NUM_ELEMENTS), torch.ones(NUM_ELEMENTS // 2))
    works.wait()


def _receive() -> None:
    if dist.get_rank() == 1:
        dist.send(torch.ones(NUM_ELEMENTS), 0)
    else:
        dist.recv(torch.empty(NUM_ELEMENTS), 1)


def _async_receive() -> None:
    if dist.get_rank() == 1:
        dist.isend(torch.ones(NUM_ELEMENTS), 0).wait()
    else:
        dist.irecv(torch.empty(NUM_ELEMENTS), 1).wait()


class _BroadcastBackward(torch.autograd.Function):
    """Broadcasts in its backward pass. Each node of its graph refers to the process group."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, is_last: bool) -> torch.Tensor:
        ctx.group, ctx.is_last = dist.group.WORLD, is_last
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.is_last:
            dist.broadcast(torch.ones(NUM_ELEMENTS), 1, group=ctx.group)
        return gradient * 2, None


def _backward_pass() -> None:
    """Run the backward pass of the survivor. Nodes are queued behind the node that broadcasts."""
    if dist.get_rank() == 1:
        _broadcast()
        return
    value = torch.ones(1, requires_grad=True)
    sum(_BroadcastBackward.apply(value, number == 3) for number in range(1, 4)).backward()  # type: ignore[union-attr]


FORGOTTEN = ("broadcast", "receive", "async_receive", "backward_pass")
"""Operations without other queued operations. Gloo never reports an error to these operations after the cut."""
OPERATIONS: dict[str, Callable[[], None]] = {
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "coalesced_reduce_scatters": _coalesced_reduce_scatters,
    "all_gather": _all_gather,
    "coalesced_all_gathers": _coalesced_all_gathers,
    "receive": _receive,
    "async_receive": _async_receive,
    "backward_pass": _backward_pass,
}


def run(name: str) -> dict[str, Any]:
    """Return what the survivor of operation ``name`` observed."""
    port = free_port("127.0.0.1")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=_be, args=(rank, port, name, theirs), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        assert ours.poll(60), f"{name}: nothing was received"
        assert ours.recv() == "cut here"
        os.kill(ranks[1].pid or 0, signal.SIGKILL)
        ranks[1].join()
        ours.send("rank 1 was killed")
        assert ours.poll(GROUP_TIMEOUT_SECONDS + 30), f"{name}: the survivor says nothing"
        seen: dict[str, Any] = ours.recv()
        began = time.monotonic()
        ranks[0].join(60)
        return {**seen, "exit_seconds": time.monotonic() - began, "exit_code": ranks[0].exitcode}
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _be(rank: int, port: int, name: str, parent: Connection) -> None:
    warnings.simplefilter("ignore")
    abort.install()
    before = open_sockets()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=30))
    timeout = timedelta(seconds=GROUP_TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    sockets = open_sockets() - before
    dist.barrier()
    if rank == 1:
        for number, _ in sockets:
            _on(number, lambda one: one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _PACE_BYTES_PER_SECOND))
        OPERATIONS[name]()
        return
    transports = Transports.among(sockets, store_port=store.port)
    transports.limit.use()
    broken: list[float] = []

    def watch() -> None:
        while _received(sockets) < _CUT_BYTES:
            time.sleep(0.001)
        parent.send("cut here")
        reason = parent.recv()
        broken.append(time.monotonic())
        transports.hang_up(reason)

    watching = threading.Thread(target=watch)
    watching.start()
    error = None
    try:
        OPERATIONS[name]()
    except RuntimeError as failure:
        error = f"{type(failure).__name__}: {failure}"
    left = time.monotonic()
    watching.join()
    groups = list(dist.distributed_c10d._world.pg_map)
    abort.drop_broken_graph()
    dist.destroy_process_group()
    held = abort.release(groups)
    released = time.monotonic()
    torch.ones(1, requires_grad=True).sum().backward()
    seen = {
        "error": error,
        "wait_seconds": left - broken[0],
        "release_seconds": released - left,
        "next_backward_seconds": time.monotonic() - released,
        "num_held": held,
        "num_abandoned": transports.limit.num_abandoned,
    }
    parent.send(seen)
    os._exit(0)


def _received(sockets: frozenset[SocketId]) -> int:
    """Return the number of received bytes of the socket in ``sockets`` that received most."""

    def count(one: socket.socket) -> int:
        about = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int.from_bytes(about[_BYTES_RECEIVED], sys.byteorder)

    return max(_on(number, count) for number, _ in sockets)


def _on(number: int, use: Callable[[socket.socket], Any]) -> Any:
    one = socket.socket(fileno=os.dup(number))
    try:
        return use(one) if one.type == socket.SOCK_STREAM and one.family != socket.AF_UNIX else 0
    finally:
        one.close()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({name: run(name) for name in sys.argv[2:] or OPERATIONS}))

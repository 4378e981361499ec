"""Tests the store on which ranks form their groups: waiting for it ends as soon as ranks are lost."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ft.config.job import ParallelConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.control.ports import free_port
from megatron_ft.mcore.groups import Groups, dissolve_groups, open_store
from megatron_ft.runtime.transport import abort
from megatron_ft.runtime.transport.abort import Opening

LONG_SECONDS = 100.0
"""Timeout that no test may reach."""

pytestmark = pytest.mark.timeout(60)


def context(rank: int, port: int) -> RankContext:
    about: dict[str, Any] = {
        "local_rank": 0,
        "node": rank,
        "num_nodes": 2,
        "generation": 1,
        "run_dir": Path(),
        "resume_from": None,
        "worker": None,
    }
    return RankContext(rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port, **about)


class Watched(Opening):
    """Reports each failed connection attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.has_tried = threading.Event()

    def pause(self, seconds: float) -> bool:
        self.has_tried.set()
        return super().pause(seconds)


@contextmanager
def opened() -> Iterator[Watched]:
    opening = Watched()
    try:
        yield opening
    finally:
        opening.close()
        abort.WaitLimit().use()


def test_a_server_that_was_there_and_is_gone_again_is_not_waited_for() -> None:
    """The server was lost between the check for it and torch's own connection attempt."""
    listener = socket.create_server(("127.0.0.1", 0))
    with opened() as opening:

        def leave() -> None:
            listener.accept()[0].close()
            listener.close()
            opening.hang_up("rank 2 was killed")

        opening.limit.use()
        leaving = threading.Thread(target=leave)
        leaving.start()
        with pytest.raises(abort.WaitAbandoned, match="reason of the shutdown: rank 2 was killed"):
            open_store(context(1, listener.getsockname()[1]), timeout_seconds=LONG_SECONDS, opening=opening)
        leaving.join()
    assert opening.limit.num_abandoned == 1, "in the middle of torch's own try, which lasts for seconds"


def test_a_machine_that_does_not_answer_is_not_waited_for() -> None:
    """A machine that died with the server does not refuse connections."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        socket.create_connection(silent.getsockname()),  # no other is let in
        opened() as opening,
    ):
        opening.hang_up("rank 0 was killed")
        with pytest.raises(RuntimeError, match="a rank was lost before rank 1 had connected to the store"):
            open_store(context(1, silent.getsockname()[1]), timeout_seconds=LONG_SECONDS, opening=opening)


def test_a_server_that_comes_late_is_waited_for_and_then_trusted_as_long_as_asked() -> None:
    port, stores = free_port("127.0.0.1"), []
    with opened() as opening:
        late = lambda: stores.append(open_store(context(1, port), timeout_seconds=LONG_SECONDS, opening=opening))  # noqa: E731
        client = threading.Thread(target=late)
        client.start()
        assert opening.has_tried.wait(LONG_SECONDS)
        server = open_store(context(0, port), timeout_seconds=LONG_SECONDS)
        client.join()
    server.set("key", "value")
    assert stores[0].get("key") == b"value"
    assert stores[0].timeout == timedelta(seconds=LONG_SECONDS)


def test_a_server_that_never_comes_is_an_error_in_time() -> None:
    with (
        opened() as opening,
        pytest.raises(RuntimeError, match=r"could not connect to the store of rank 0 at 127.0.0.1:\d+ within 0.2 s"),
    ):
        open_store(context(1, free_port("127.0.0.1")), timeout_seconds=0.2, opening=opening)


def test_who_has_nothing_to_break_off_its_wait_has_torchs_own() -> None:
    with pytest.raises(dist.DistNetworkError):
        open_store(context(1, free_port("127.0.0.1")), timeout_seconds=0.2)


class Device:
    """Process groups of one rank that claim to use NCCL. Calls on them are recorded in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._sockets: list[socket.socket] = []
        init, destroy, abort = (
            dist.init_process_group,
            dist.destroy_process_group,
            dist.distributed_c10d._abort_process_group,
        )

        def connect() -> None:
            listener = socket.create_server(("127.0.0.1", 0))
            self._sockets += [socket.create_connection(listener.getsockname()), listener.accept()[0], listener]

        def init_process_group(backend: str, **about: Any) -> None:
            self.calls.append(f"init {backend}")
            init(backend="gloo", **about)
            connect()

        def synchronize() -> None:
            self.calls.append("synchronize")
            connect()  # what was queued has come to its first use of a peer

        def noted(name: str, function: Any) -> Any:
            return lambda *args: (self.calls.append(name), function(*args))[1]

        monkeypatch.setattr(dist, "init_process_group", init_process_group)
        monkeypatch.setattr(dist, "destroy_process_group", noted("destroy", destroy))
        monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", noted("abort", abort))
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def form(self) -> Groups:
        return Groups.form(
            ParallelConfig(),
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            generation=0,
            device="cuda",
            timeout_seconds=LONG_SECONDS,
        )

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device(monkeypatch)
    yield made
    made.close()
    abort.WaitLimit().use()
    is_left = dist.is_initialized() or parallel_state.model_parallel_is_initialized()
    if is_left:
        monkeypatch.undo()
        dissolve_groups()
    assert not is_left, "the test has dissolved its groups"


def test_sockets_of_nccl_are_not_shut_down_with_those_of_gloo(device: Device) -> None:
    """A single rank has no peers, so all connections belong to the replacement for NCCL."""
    groups = device.form()
    assert device.calls == ["init nccl"] and len(groups.transports) == 0
    assert groups.add([0], timeout_seconds=LONG_SECONDS) is not None
    assert device.calls == ["init nccl", "synchronize"] and len(groups.transports) == 0
    del groups
    dissolve_groups()


def test_communicators_of_nccl_are_aborted_before_groups_are_dropped(device: Device) -> None:
    groups = device.form()
    groups.transports.hang_up("rank 1 was killed")
    del groups
    dissolve_groups()
    assert device.calls == ["init nccl", "abort"]
    assert dist.distributed_c10d._world.group_count == 0


def test_groups_that_nobody_has_broken_are_destroyed_together(device: Device) -> None:
    device.form()
    dissolve_groups()
    assert device.calls == ["init nccl", "destroy"]

"""The store that ranks form their groups on: waiting for it ends as soon as ranks are lost."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ft.control.ports import free_port
from megatron_ft.control.worker import RankContext
from megatron_ft.mcore.groups import open_store
from megatron_ft.runtime.transport import waits
from megatron_ft.runtime.transport.hang_up import Opening

LONG_SECONDS = 100.0
"""Nobody waits so long: a test that did would be over time."""

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
    """Says when a try has failed."""

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
        waits.use(waits.WaitLimit())


def test_a_server_that_was_there_and_is_gone_again_is_not_waited_for() -> None:
    """It was lost, or broke off, between the look whether it is there and torch's own try."""
    listener = socket.create_server(("127.0.0.1", 0))
    with opened() as opening:

        def leave() -> None:
            listener.accept()[0].close()
            listener.close()
            opening.hang_up("rank 2 was killed")

        waits.use(opening.limit)
        leaving = threading.Thread(target=leave)
        leaving.start()
        with pytest.raises(waits.WaitAbandoned, match=r"\(rank 2 was killed\)"):
            open_store(context(1, listener.getsockname()[1]), timeout_seconds=LONG_SECONDS, opening=opening)
        leaving.join()
    assert opening.limit.num_abandoned == 1, "in the middle of torch's own try, which lasts for seconds"


def test_a_machine_that_does_not_answer_is_not_waited_for() -> None:
    """As one that died with the server: nobody refuses the connection."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        socket.create_connection(silent.getsockname()),  # no other is let in
        opened() as opening,
    ):
        opening.hang_up("rank 0 was killed")
        with pytest.raises(RuntimeError, match="ranks were lost before anybody served the store"):
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
    with opened() as opening, pytest.raises(RuntimeError, match=r"nobody serves the store at 127.0.0.1:\d+ for 0.2 s"):
        open_store(context(1, free_port("127.0.0.1")), timeout_seconds=0.2, opening=opening)


def test_who_has_nothing_to_break_off_its_wait_has_torchs_own() -> None:
    with pytest.raises(dist.DistNetworkError):
        open_store(context(1, free_port("127.0.0.1")), timeout_seconds=0.2)

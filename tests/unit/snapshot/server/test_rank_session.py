"""One rank's connection, served in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.planning.snapshot.buffers import BufferStates
from megatron_ft.snapshot.server.client import MAX_UNREAD, REPLICATED_START, KeeperClient, KeeperRefused
from tests.unit.snapshot.server.nodes import PAGE, begin, capture, wait_replicated, wait_until, window
from tests.unit.snapshot.server.served import Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    running = Served(tmp_path)
    yield running
    running.close()


def committed_and_next(served: Served) -> KeeperClient:
    """Window 10, due to storage, has been superseded by window 12."""
    client = served.client()
    arena = client.allocate(2 * PAGE)
    for number in range(2):
        window(client, arena, 0, number, 10 + 2 * number)
        wait_replicated(arena, 10 + 2 * number)
        client.committed(10 + 2 * number)
    return client


def test_a_buffer_that_is_being_written_is_named_and_not_given_away(served: Served) -> None:
    client = committed_and_next(served)
    wait_until(lambda: client.buffer_states().pinned == {0, 1}, "both are due")
    begin(client, 0, 14)
    with pytest.raises(KeeperRefused, match="buffer=0: is being written to storage"):
        client.problems()
    served.persister.start()
    wait_until(lambda: not client.buffer_states().pinned, "both are written")
    begin(client, 0, 14)
    assert len(list(Path(served.url).rglob("*.window"))) == 2
    assert client.problems() == []
    client.close()


def test_a_commit_that_the_keeper_has_yet_to_take_in_is_known_to_be_missing(served: Served) -> None:
    """It may pin a buffer: what the status page says of pinned ones is then not all."""
    client = served.client()
    assert client.buffer_states() == BufferStates()
    arena = client.allocate(2 * PAGE)
    window(client, arena, 0, 1, 10)
    wait_replicated(arena, 10)
    assert client.buffer_states().knows_commits
    with served.store.lock:
        client.committed(10)
        states = client.buffer_states()
        assert states.replicated == {0: -1, 1: 10, 2: -1} and not states.pinned and not states.knows_commits
    wait_until(lambda: client.buffer_states().knows_commits, "it is taken in")
    assert client.buffer_states().pinned == {1}
    client.allocate(4 * PAGE)
    assert client.buffer_states() == BufferStates(
        replicated={0: -1, 1: -1, 2: -1}, given_up={0: -1, 1: -1, 2: -1}, pinned=frozenset()
    ), "new memory holds nothing, and no commit is outstanding"
    client.close()


def test_a_window_the_job_lets_go_of_is_forgotten(served: Served) -> None:
    client = served.client()
    arena = client.allocate(2 * PAGE)
    for number in range(2):
        window(client, arena, 0, number, 10 + 2 * number)
    wait_replicated(arena, 12)
    client.abandon(10)
    assert [entry.start_iteration for entry in client.inventory(0)] == [12]
    client.committed(12)
    client.abandon(12)
    with pytest.raises(KeeperRefused, match="start_iteration=12: there is no window to abandon"):
        client.problems()
    client.close()


def test_many_slices_between_two_requests(served: Served) -> None:
    """Their answers must not fill the socket."""
    client = served.client()
    num_slices = 40 * MAX_UNREAD
    arena = client.allocate(num_slices * PAGE)
    begin(client, 0, 0, num_slices=num_slices)
    for index in range(num_slices):
        capture(client, arena, 0, 0, 0, index, num_bytes=16)
    wait_until(lambda: arena.status(REPLICATED_START) == 0, "all are hashed", seconds=60)
    client.close()

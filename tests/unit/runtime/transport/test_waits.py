"""Tests that waits for gloo end with their limit, and otherwise have the results of torch."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from megatron_ft.runtime.transport import abort
from megatron_ft.runtime.transport.abort import WaitAbandoned, WaitLimit

LONG = timedelta(seconds=100)
"""Timeout of the groups, which no test may reach."""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[WaitLimit]:
    """Yield a limit that is in use. Waits are replaced until the end of the test."""
    for owner, name in ((dist.Work, "wait"), (ProcessGroupGloo, "__init__"), (abort, "_is_installed")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(abort, "_in_use", WaitLimit(grace_seconds=0.05))
    abort.install()
    yield abort.WaitLimit.in_use()


def both(make: Callable[[int], Any]) -> list[Any]:
    """Return the results of ``make(rank)`` on two ranks, which are threads."""
    made: list[Any] = [None, None]

    def be(rank: int) -> None:
        made[rank] = make(rank)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def two_groups() -> list[ProcessGroupGloo]:
    """Return the group of two ranks, as seen by each of them."""
    store = HashStore()
    return both(lambda rank: ProcessGroupGloo(store, rank, 2, timeout=LONG))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)


def test_results_and_errors_are_those_of_torch(limit: WaitLimit) -> None:
    groups, tensors = two_groups(), [torch.ones(3), torch.full((3,), 2.0)]
    assert both(lambda rank: groups[rank].allreduce([tensors[rank]]).wait()) == [True, True]
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * 2
    sent = groups[0].send([torch.full((3,), 7.0)], 1, 0)
    assert groups[1].recv([tensors[1]], 0, 0).wait()
    assert sent.wait()
    assert tensors[1].tolist() == [7.0] * 3
    with pytest.raises(RuntimeError, match="imed out"):
        groups[0].barrier().wait(timedelta(milliseconds=1))
    assert limit.num_abandoned == 0


def test_a_wait_that_lasts_longer_than_a_slice_goes_on(limit: WaitLimit) -> None:
    groups, tensors = two_groups(), [torch.ones(3), torch.ones(3)]
    begun = groups[0].allreduce([tensors[0]])
    timer = threading.Timer(0.25, lambda: groups[1].allreduce([tensors[1]]).wait())
    timer.start()
    assert begun.wait()
    timer.join()
    assert tensors[0].tolist() == [2.0] * 3


def test_a_collective_that_nobody_answers_is_abandoned_and_its_group_held_until_it_ends(limit: WaitLimit) -> None:
    groups, tensors = two_groups(), [torch.ones(3), torch.ones(3)]
    begun = groups[0].allreduce([tensors[0]])
    limit.end("rank 1 was killed")
    with pytest.raises(WaitAbandoned, match="reason of the shutdown: rank 1 was killed"):
        begun.wait()
    assert limit.num_abandoned == 1
    del begun
    earlier = abort.num_held()
    began = time.monotonic()
    assert abort.release([groups.pop(0)]) == earlier + 1
    assert time.monotonic() - began < 20, "no rank waits for a group that is held"
    gc.collect()
    assert abort.num_held() == earlier + 1
    WaitLimit().use()
    assert groups[0].allreduce([tensors[1]]).wait()
    until(lambda: abort.num_held() == earlier)
    assert tensors[0].tolist() == [2.0] * 3, "its memory was its own until the end"


def test_groups_without_blocked_operations_are_gone_at_once(limit: WaitLimit) -> None:
    groups, earlier = two_groups(), abort.num_held()
    both(lambda rank: groups[rank].barrier().wait())
    abort.release(groups)
    assert groups == []
    until(lambda: abort.num_held() == earlier)


def test_a_receive_that_nobody_answers_is_abandoned_and_leaves_its_group_connected(limit: WaitLimit) -> None:
    """The timeout of a receive would close the connections of its group."""
    groups, target = two_groups(), torch.zeros(3)
    begun = groups[0].recv([target], 1, 0)
    limit.end("rank 1 was killed")
    with pytest.raises(WaitAbandoned):
        begun.wait()
    WaitLimit().use()
    assert groups[1].send([torch.ones(3)], 0, 0).wait()
    until(lambda: target.tolist() == [1.0] * 3)


def test_a_group_whose_other_rank_never_connects_is_abandoned(limit: WaitLimit) -> None:
    store = PrefixStore("alone", HashStore())
    limit.end("rank 1 was killed")
    with pytest.raises(WaitAbandoned):
        ProcessGroupGloo(store, 0, 2, timeout=LONG)


def test_a_call_returns_or_raises_what_its_function_does(limit: WaitLimit) -> None:
    assert abort.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        abort.call(lambda: 1 // 0)
    assert abort.call(lambda: threading.current_thread().name) == "gloo call"


def test_an_error_of_a_call_leaves_no_cycle_behind(limit: WaitLimit) -> None:
    """The frames in the error's traceback refer to process groups."""
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            abort.call(lambda: 1 // 0)
        assert not [found for found in gc.get_objects() if type(found) is ZeroDivisionError]
    finally:
        gc.enable()


def test_only_the_first_reason_counts_and_grace_comes_first() -> None:
    limit = WaitLimit(grace_seconds=100.0)
    limit.end("first")
    limit.check()
    limit = WaitLimit(grace_seconds=0.0)
    limit.end("first")
    limit.end("second")
    with pytest.raises(WaitAbandoned, match="first"):
        limit.check()

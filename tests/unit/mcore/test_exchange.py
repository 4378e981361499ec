"""Tests that tensors of any type reach other ranks with every bit."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ft.mcore.groups import exchange_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def groups_without_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's call, which looks up the default group of the process, find the group of the calling thread."""

    def all_to_all_single(
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_sizes: list[int],
        send_sizes: list[int],
        *,
        group: dist.ProcessGroup,
    ) -> None:
        group.alltoall_base(received, sent, receive_sizes, send_sizes, dist.AllToAllOptions()).wait()

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")


def on_ranks(num_ranks: int, call: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """Run ``call`` on gloo ranks that are threads of this process."""
    store = dist.HashStore()
    results: list[Any] = [None] * num_ranks

    def be(rank: int) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("ranks", store), rank, num_ranks)
        results[rank] = call(group)

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(result is not None for result in results), "every rank came back"
    return results


def content(source: int, target: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that ``source`` sends to ``target``: [source + 1, 3], every byte set, not contiguous."""
    generator = torch.Generator().manual_seed(10 * source + target)
    size = torch.empty(0, dtype=dtype).element_size()
    filled = torch.randint(0, 2, (3, source + 1, size), generator=generator, dtype=torch.uint8)
    if dtype is not torch.bool:
        filled = filled * 113 + target
    return filled.view(dtype).view(3, source + 1).t()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_bit_arrives_whatever_the_type(num_ranks: int) -> None:
    """Each rank sends one tensor of each type to every rank, including itself."""

    def call(group: dist.ProcessGroup) -> list[Any]:
        me = group.rank()
        outgoing = [[content(me, other, dtype) for dtype in DTYPES] for other in range(num_ranks)]
        incoming = [[torch.empty((other + 1, 3), dtype=dtype) for dtype in DTYPES] for other in range(num_ranks)]
        exchange_tensors(outgoing, incoming, group)
        return [
            (other, dtype)
            for other in range(num_ranks)
            for dtype, found in zip(DTYPES, incoming[other], strict=True)
            if not same_bits(found, content(other, me, dtype))
        ]

    assert on_ranks(num_ranks, call) == [[]] * num_ranks


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_parts_of_larger_tensors_are_filled_in_place() -> None:
    """Targets may be views. Scalars and empty tensors are sent too."""

    def call(group: dist.ProcessGroup) -> list[Any]:
        other = 1 - group.rank()
        whole, step, nothing = torch.zeros(4, 2), torch.zeros(()), torch.ones(0, 5)
        outgoing: list[list[torch.Tensor]] = [[], []]
        outgoing[other] = [torch.full((4,), 1.0 + group.rank()), torch.tensor(7.0 + group.rank()), nothing]
        incoming: list[list[torch.Tensor]] = [[], []]
        incoming[other] = [whole[:, 1], step, nothing]
        exchange_tensors(outgoing, incoming, group)
        return [whole.tolist(), float(step)]

    first, second = on_ranks(2, call)
    assert first == [[[0.0, 2.0]] * 4, 8.0]
    assert second == [[[0.0, 1.0]] * 4, 7.0]


def test_ranks_with_nothing_to_send_take_part() -> None:
    """One rank sends one tensor to one other rank; the third rank sends and receives nothing."""

    def call(group: dist.ProcessGroup) -> list[Any]:
        outgoing: list[list[torch.Tensor]] = [[], [], []]
        incoming: list[list[torch.Tensor]] = [[], [], []]
        target = torch.zeros(2)
        if group.rank() == 0:
            outgoing[2] = [torch.tensor([3.0, 4.0])]
        if group.rank() == 2:
            incoming[0] = [target]
        exchange_tensors(outgoing, incoming, group)
        return target.tolist()

    assert on_ranks(3, call) == [[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]]

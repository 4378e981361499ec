"""Tests the exchange on one rank, its refusals and its count of bytes. The contract test uses several ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_ft.mcore.moe.replica_layer import ExchangeCounter, _AllToAll, gather_counts


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_counter_tells_kept_from_sent() -> None:
    counter = ExchangeCounter()
    counter.add([3, 5, 0], rank=1, row_bytes=8)
    counter.add([1, 0, 2], rank=1, row_bytes=4)
    assert counter == ExchangeCounter(sent_bytes=3 * 8 + 3 * 4, kept_bytes=5 * 8, num_exchanges=2)


def test_one_rank_keeps_everything(alone: dist.ProcessGroup) -> None:
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    counter = ExchangeCounter()
    arrived = _AllToAll.apply(rows, [5], [5], alone, counter)
    assert torch.equal(arrived, rows)
    (arrived * 2).sum().backward()
    assert torch.equal(rows.grad, torch.full_like(rows, 2))
    assert counter == ExchangeCounter(kept_bytes=2 * 5 * 3 * 8, num_exchanges=2)


def test_rows_and_splits_must_match(alone: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="5 rows cannot be sent with splits"):
        _AllToAll.apply(torch.zeros(5, 3), [4], [4], alone, None)
    with pytest.raises(ValueError, match="in a group of size 1"):
        _AllToAll.apply(torch.zeros(5, 3), [4, 1], [4, 1], alone, None)


def test_counts_are_per_expert_and_rank(alone: dist.ProcessGroup) -> None:
    routing_map = torch.tensor([[True, False, True], [False, False, True]])
    assert gather_counts(routing_map, alone).tolist() == [[1], [0], [2]]

"""Tests that ranges of flattened parameters are cut into boxes that contain each of their elements once."""

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.mcore.optimizer.stored_ranges import boxes, shards_of_range


@st.composite
def ranges(draw: Any) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(ranges())
def test_boxes_contain_the_elements_of_a_range_once_and_in_order(drawn: tuple[tuple[int, ...], int, int]) -> None:
    import torch

    shape, start, stop = drawn
    numbers = torch.arange(prod(shape)).view(shape)
    found = list(boxes(shape, start, stop))
    parts = [numbers[tuple(slice(at, at + n) for at, n in zip(b.offset, b.sizes, strict=True))] for b in found]
    assert torch.cat([numbers.new_empty(0), *(part.reshape(-1) for part in parts)]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(
        part.is_contiguous() and part.numel() == box.num_elements for part, box in zip(parts, found, strict=True)
    )


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (5, 19), (11, 13), (12, 12), (20, 24)])
@pytest.mark.parametrize("is_shared", [True, False])
def test_halves_of_a_parameter_are_separate_tensors(start: int, stop: int, is_shared: bool) -> None:
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    parameter = torch.zeros(4, 6)

    def build(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        # The second of two tensor-parallel parts, each of which has both halves.
        return [
            ShardedTensor.from_rank_offsets(f"{key}_{name}", half, (0, 1, 2), replica_id=replica_id)
            for name, half in zip("wv", tensor.chunk(2), strict=True)
        ]

    factory = ShardedTensorFactory("fc1", parameter, build, lambda loaded: loaded, (0, 1, 3))
    values = torch.arange(start, stop, dtype=torch.float32)
    found = shards_of_range(factory, start, stop, values, is_shared=is_shared)
    whole = {"fc1_w": torch.full((4, 6), -1.0), "fc1_v": torch.full((4, 6), -1.0)}
    for shard in found:
        assert shard.global_shape == (4, 6) and shard.replica_id == ((0, 1, 0) if is_shared else (0, 1, 3))
        whole[shard.key][shard.global_slice()] = shard.data
    stored = torch.cat([whole["fc1_w"][2:], whole["fc1_v"][2:]]).view(-1)
    assert stored[start:stop].tolist() == values.tolist()
    assert (stored >= 0).sum() == stop - start and bool((whole["fc1_w"][:2] == -1).all())


def test_a_parameter_that_is_cut_into_copies_is_refused() -> None:
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def build(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, tensor.clone(), replica_id=replica_id)]

    factory = ShardedTensorFactory("fc1", torch.zeros(4), build, lambda loaded: loaded, (0, 0, 0))
    with pytest.raises(AssertionError, match="fc1: is not a contiguous part of its parameter from element 0"):
        shards_of_range(factory, 0, 4, None, is_shared=False)


def test_a_rank_without_a_shared_group_keeps_the_number_of_its_copy() -> None:
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    whole = ShardedTensor.from_rank_offsets("w", torch.zeros(3), replica_id=(0, 0, 2))
    assert [shard.replica_id for shard in shards_of_range(whole, 0, 3, None, is_shared=False)] == [(0, 0, 2)]

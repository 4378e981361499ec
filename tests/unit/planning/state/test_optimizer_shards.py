import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.model_state import _BufferLayout


def rows(layout: _BufferLayout, num_shards: int) -> list[tuple[int, int, int, int]]:
    found = layout.shards(num_shards)
    columns = (found.shard, found.parameter, found.start, found.stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_last_parameter_comes_first_and_buckets_are_cut_evenly() -> None:
    layout = _BufferLayout.of([100, 70], padded_for=[2])
    assert layout.ranges == ((128, 228), (0, 70))
    assert layout.buckets == ((0, 256),)
    assert rows(layout, 2) == [(0, 1, 0, 70), (1, 0, 0, 100)]
    assert rows(layout, 4) == [(0, 1, 0, 64), (1, 1, 64, 70), (2, 0, 0, 64), (3, 0, 64, 100)]


def test_full_buckets_and_shared_embeddings_end_a_bucket() -> None:
    layout = _BufferLayout.of([50, 50, 200, 10], padded_for=[1], bucket_size=150, alone={1})
    assert layout.ranges == ((512, 562), (384, 434), (64, 264), (0, 10))
    assert layout.buckets == ((0, 384), (384, 512), (512, 640))


def test_a_bucket_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_shards=3: must divide the size of every bucket; one has 128 elements"):
        _BufferLayout.of([10], padded_for=[1]).shards(3)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 7), st.data())
def test_every_element_is_in_one_shard(sizes: list[int], num_shards: int, data: st.DataObject) -> None:
    bucket = data.draw(st.none() | st.integers(1, 400))
    alone = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    layout = _BufferLayout.of(sizes, padded_for=[num_shards, 4], bucket_size=bucket, alone=alone)
    found = [(p, e) for _, p, start, stop in rows(layout, num_shards) for e in range(start, stop)]
    assert sorted(found) == [(p, e) for p, size in enumerate(sizes) for e in range(size)]

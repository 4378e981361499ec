"""Tests that the order of samples is a pure function of (seed, index)."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.corpus.samples import Place, _check_weights, _permute, _SampleOrder
from megatron_ft.errors import ConfigError

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 700), key=st.text(max_size=8))
def test_permute_is_a_bijection(size: int, key: str) -> None:
    assert sorted(_permute(position, size, key) for position in range(size)) == list(range(size))


@given(size=st.integers(1, 1 << 48), data=st.data())
def test_permute_stays_inside_and_keeps_positions_apart(size: int, data: st.DataObject) -> None:
    positions = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=20))
    images = {_permute(position, size, "key") for position in positions}
    assert len(images) == len(positions)
    assert min(images) >= 0 and max(images) < size


def test_permutations_look_shuffled() -> None:
    size = 10_000
    images = [_permute(position, size, "a") for position in range(size)]
    fixed = sum(image == position for position, image in enumerate(images))
    neighbours = sum(abs(images[i] - images[i + 1]) == 1 for i in range(size - 1))
    halves = sum(image < size // 2 for image in images[: size // 2])
    shared = sum(image == _permute(position, size, "b") for position, image in enumerate(images))
    assert fixed < 12 and neighbours < 12 and shared < 12
    assert abs(halves - size // 4) < 200  # four standard deviations of 50


def test_every_permutation_of_three_appears() -> None:
    seen = Counter(tuple(_permute(position, 3, str(key)) for position in range(3)) for key in range(1200))
    assert len(seen) == 6
    assert min(seen.values()) > 130


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 200), seed=st.integers(), epoch=st.integers(0, 5))
def test_an_epoch_uses_each_sample_once(size: int, seed: int, epoch: int) -> None:
    order = _SampleOrder(seed=seed, split="train", num_samples=(size,))
    places = [order.locate(epoch * size + position) for position in range(size)]
    assert {place.epoch for place in places} == {epoch}
    assert sorted(place.sample for place in places) == list(range(size))


def test_epochs_seeds_and_splits_differ() -> None:
    def samples(seed: int = 1, split: str = "train", first: int = 0) -> list[int]:
        order = _SampleOrder(seed=seed, split=split, num_samples=(100,))
        return [order.locate(first + position).sample for position in range(100)]

    orders = [samples(), samples(first=100), samples(seed=2), samples(split="valid")]
    assert len({tuple(order) for order in orders}) == 4


@settings(max_examples=20, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 1 << 64), data=st.data())
def test_blend_uses_samples_of_every_source_in_whole_epochs(sizes: list[int], seed: int, data: st.DataObject) -> None:
    weights = data.draw(st.none() | st.lists(st.floats(0.05, 50), min_size=len(sizes), max_size=len(sizes)))
    order = _SampleOrder(
        seed=seed, split="train", num_samples=tuple(sizes), weights=None if weights is None else tuple(weights)
    )
    num_blocks = 2
    used: list[Counter[tuple[int, int]]] = [Counter() for _ in sizes]
    shares = [weight / sum(weights or sizes) for weight in (weights or sizes)]
    for block in range(num_blocks):
        for index in range(block * order.block_samples, (block + 1) * order.block_samples):
            place = order.locate(index)
            used[place.source][(place.epoch, place.sample)] += 1
        for count, share in zip(used, shares, strict=True):
            assert abs(count.total() - share * (block + 1) * order.block_samples) < 1 + 1e-6
    for counts, size in zip(used, sizes, strict=True):
        assert all(count == 1 for count in counts.values())
        per_epoch = Counter(epoch for epoch, _ in counts)
        assert all(per_epoch[epoch] == size for epoch in range(len(per_epoch) - 1))


@given(first=st.integers(0, 1 << 60), weights=st.tuples(*[st.floats(1e-4, 1e4)] * 3))
def test_far_indices_cost_no_more_and_agree_in_any_order(first: int, weights: tuple[float, float, float]) -> None:
    arguments = {"seed": 3, "split": "train", "num_samples": (1000, 7, 123_456_789), "weights": weights}
    forward, backward = _SampleOrder(**arguments), _SampleOrder(**arguments)
    indices = range(first, first + 8)
    there = [forward.locate(index) for index in indices]
    assert there[::-1] == [backward.locate(index) for index in reversed(indices)]
    assert len(set(there)) == 8


def test_no_drift_after_many_blocks() -> None:
    order = _SampleOrder(seed=1, split="train", num_samples=(10**9, 10**9, 10**9), weights=(1.0, 1e-3, 7.0))
    last = 10**6 * order.block_samples - 1
    places = [order.locate(index) for index in range(last - order.block_samples + 1, last + 1)]
    share = 1e-3 / 8.001
    rare = [place for place in places if place.source == 1]
    assert abs(len(rare) - share * order.block_samples) < 2


def test_order_is_pinned() -> None:
    """These values must not change, because another order would change every resumed run."""
    single = _SampleOrder(seed=1234, split="train", num_samples=(1000,))
    blend = _SampleOrder(seed=1234, split="train", num_samples=(1000, 50), weights=(0.7, 0.3))
    assert [single.locate(index).sample for index in range(5)] == PINNED_SINGLE
    assert [blend.locate(index) for index in range(3)] == PINNED_BLEND


PINNED_SINGLE = [742, 772, 602, 222, 447]
PINNED_BLEND = [
    Place(source=0, epoch=0, sample=237),
    Place(source=0, epoch=0, sample=778),
    Place(source=0, epoch=0, sample=720),
]


def test_negative_index() -> None:
    with pytest.raises(ValueError, match="sample index -1"):
        _SampleOrder(seed=1, split="train", num_samples=(5,)).locate(-1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "must have as many weights as there are sources, 2"),
        ([1.0, 0.0], r"data.train_weights\[1\]=0.0: must be positive"),
        ([-1.0, 1.0], r"\[0\]=-1.0"),
        ([float("nan"), 1.0], r"\[0\]=nan"),
        ([1.0, float("inf")], r"\[1\]=inf"),
        ([1.0, 1e-12], "factor of 1e9"),
    ],
)
def test_bad_weights(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _check_weights("data.train_weights", weights, 2)

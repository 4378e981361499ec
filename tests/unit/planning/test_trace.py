"""Tests that forced routing equals a record exactly, and is the same wherever it is computed."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.expert_loads import ExpertLoads
from megatron_ft.planning.trace import RoutingTrace, _shuffled, expert_token_counts, forced_experts


def mixed(value: int) -> int:
    """Compute the finaliser of SplitMix64 for one number at a time."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def recording(tokens: list[list[list[float]]]) -> ExpertLoads:
    """Return loads ``[records][layers][experts]``, half of them on each of two ranks."""
    values = np.asarray(tokens)[:, None, :, None, :]
    return ExpertLoads(
        source="r.json", iterations=tuple(range(len(tokens))), tokens=np.concatenate([values, values], axis=1)
    )


def model(num_layers: int = 2, num_experts: int = 2, **fields: object) -> ModelConfig:
    return ModelConfig(num_layers=num_layers, num_moe_experts=num_experts, **fields)  # type: ignore[arg-type]


@st.composite
def demands(draw: st.DrawFn) -> tuple[list[int], int, int]:
    loads = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any))
    return loads, draw(st.integers(1, 60)), draw(st.integers(1, len(loads)))


@given(demands())
def test_counts_are_exact_and_in_proportion(demand: tuple[list[int], int, int]) -> None:
    loads, num_tokens, topk = demand
    counts = expert_token_counts(loads, num_tokens, topk)
    assert sum(counts) == num_tokens * topk
    assert max(counts) <= num_tokens
    capped = {expert for expert, count in enumerate(counts) if count == num_tokens}
    rest = sum(load for expert, load in enumerate(loads) if expert not in capped)
    left = num_tokens * (topk - len(capped))
    for expert, load in enumerate(loads):
        if expert not in capped and rest:
            assert abs(counts[expert] - Fraction(load * left, rest)) < 1


@given(demands())
def test_proportions_that_fit_are_kept_to_within_a_token(demand: tuple[list[int], int, int]) -> None:
    loads, num_tokens, topk = demand
    shares = [Fraction(load * num_tokens * topk, sum(loads)) for load in loads]
    if max(shares) <= num_tokens:
        counts = expert_token_counts(loads, num_tokens, topk)
        assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))


@pytest.mark.parametrize(
    ("loads", "num_tokens", "topk", "counts"),
    [
        ([1, 1, 1], 4, 1, [2, 1, 1]),
        ([3, 1], 8, 1, [6, 2]),
        ([9, 1, 0, 0], 10, 2, [10, 10, 0, 0]),
        ([9, 0, 0], 10, 2, [10, 5, 5]),
        ([0.5, 0.25, 0.25], 8, 1, [4, 2, 2]),
    ],
)
def test_counts_by_hand(loads: list[float], num_tokens: int, topk: int, counts: list[int]) -> None:
    assert expert_token_counts(loads, num_tokens, topk) == counts


@given(demands(), st.text(max_size=3))
def test_every_token_has_different_experts(demand: tuple[list[int], int, int], key: str) -> None:
    loads, num_tokens, topk = demand
    counts = expert_token_counts(loads, num_tokens, topk)
    experts = forced_experts(counts, num_tokens, key)
    assert experts.shape == (num_tokens, topk)
    assert all(len(set(row)) == topk for row in experts.tolist())
    assert np.bincount(experts.ravel(), minlength=len(loads)).tolist() == counts


def test_keys_name_orders_that_never_change() -> None:
    start = int.from_bytes(hashlib.blake2b(b"a", digest_size=8).digest(), "little")
    assert _shuffled(8, "a").tolist() == sorted(range(8), key=lambda i: mixed((start + i * 0x9E3779B97F4A7C15) % 2**64))
    first, second = _shuffled(1000, "a").tolist(), _shuffled(1000, "b").tolist()
    assert sorted(first) == sorted(second) == list(range(1000))
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 10


def test_most_loaded_experts_of_each_layer_in_the_order_of_the_file() -> None:
    trace = RoutingTrace.of(model(), recording([[[1, 9, 5], [7, 0, 1]], [[2, 1, 6], [1, 3, 1]]]))
    assert trace.tokens.tolist() == [[[18, 10], [14, 0]], [[2, 12], [2, 6]]]
    assert trace.loads(2, 1) == [2, 12]
    assert "not used: least loaded experts: 1" in trace.summary()


def test_layers_without_loads_are_dense_and_the_rest_map_in_order() -> None:
    recorded = recording([[[0, 0], [1, 2], [3, 4], [5, 6]]])
    trace = RoutingTrace.of(model(num_layers=3, moe_first_dense_layers=1), recorded)
    assert trace.layer_numbers == (2, 3)
    assert trace.loads(1, 3) == [6, 8]
    assert trace.dropped_layers == 1


def test_records_follow_iterations_and_start_over() -> None:
    trace = RoutingTrace.of(model(num_layers=1, router_trace_start=1), recording([[[1, 1]], [[1, 2]], [[1, 3]]]))
    assert [trace.record_of(iteration) for iteration in range(6)] == [1, 1, 2, 0, 1, 2]
    assert trace.wrap(2) is None
    assert "after iteration 2" in (trace.wrap(3) or "")
    alone = RoutingTrace.of(model(num_layers=1), recording([[[1, 1]]]))
    assert (alone.wrap(1), alone.wrap(2)) == (None, "r.json has one record, which routes every iteration")


@pytest.mark.parametrize(
    ("chosen", "tokens", "error", "says"),
    [
        (model(num_layers=3), [[[1, 2], [3, 4]]], DataError, "has 2 layers with loads, but must have at least 3"),
        (model(num_experts=3), [[[1, 2], [3, 4]]], DataError, "has 2 experts, but must have at least 3"),
        (model(), [[[1, 2], [3, 4]], [[0, 0], [1, 1]]], DataError, "record 1 must have tokens for layer 1"),
        (
            model(router_trace_start=1),
            [[[1, 2], [3, 4]]],
            ConfigError,
            "model.router_trace_start=1: must be from 0 to 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    chosen: ModelConfig, tokens: list[list[list[float]]], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        RoutingTrace.of(chosen, recording(tokens))

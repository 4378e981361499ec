"""Tests that every cast and every regime has a defined result for overflow, underflow, NaN, infinity, zero, equal
values and tensors of one element or none: no NaN appears that was not given, and nothing becomes infinite."""

import math

import pytest
import torch

from transformer_engine_ext.adamw import Factors, Hyperparameters, ScaledState, compute_weights, update
from transformer_engine_ext.formats import E4M3, E5M2, FP16, FP32, Draws
from transformer_engine_ext.linear import LinearScalers, linear
from transformer_engine_ext.providers import TorchProvider
from transformer_engine_ext.quantized import QuantizedTensor, largest_finite, quantize_blocks, scales_for
from transformer_engine_ext.recipes import AmaxHistory, Recipe
from transformer_engine_ext.regimes import REGIMES

INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max
EDGES = {
    "zeros": torch.zeros(130),
    "negative zeros": -torch.zeros(64),
    "all equal": torch.full((200,), 0.3),
    "one element": torch.tensor([-3.7e-5]),
    "one zero": torch.tensor([0.0]),
    "one infinity": torch.tensor([INF]),
    "one nan": torch.tensor([NAN]),
    "no dimension": torch.tensor(2.5),
    "empty": torch.empty(0),
    "empty rows": torch.empty(0, 16),
    "largest": torch.full((70,), LARGEST),
    "subnormal": torch.full((70,), 1e-45),
    "infinite": torch.tensor([INF, -INF, 1.0, -2.0]),
    "nan": torch.tensor([NAN, 1.0, 100.0, -INF]),
    "wide": torch.logspace(-44, 38, 128),
    "matrix": torch.tensor([[1e30, -1e-30], [0.0, NAN]]),
}
SCALINGS = ("tensorwise", "blockwise", "delayed")


def assert_is_defined(found: QuantizedTensor, given: torch.Tensor) -> None:
    """Assert that shape, NaN and finite values of ``given`` are kept, and that no scale is one that no cast makes."""
    decoded = found.decode()
    assert decoded.shape == given.shape
    assert decoded.isnan().equal(given.isnan())
    assert decoded[~given.isnan()].isfinite().all()
    assert ((found.scales >= 1) & (found.scales <= 254)).all()
    # A sign is never lost, also where a value is clamped or becomes zero.
    numbers = ~given.isnan()
    assert decoded[numbers].signbit().equal(given[numbers].signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("edge", EDGES)
def test_recipes_are_defined_for_every_role(edge: str, scaling: str, dtype: torch.dtype) -> None:
    given = EDGES[edge].to(dtype)
    for role in ("weight", "input", "output_gradient"):
        recipe = Recipe(scaling=scaling)
        history = AmaxHistory.of(recipe, num_iterations=2) if scaling == "delayed" else None
        scaler = (history or recipe).scaler(role)
        for _ in range(3):  # delayed scaling uses the magnitude of the first iteration in the second one
            assert_is_defined(scaler.quantize(given), given.to(torch.float32))
            if history is not None:
                history.advance()
                history.begin()
                assert history.history.isfinite().all()  # an infinity would spoil the iterations after it


@pytest.mark.parametrize("target", [E4M3, E5M2, FP16], ids=lambda found: found.name)
@pytest.mark.parametrize("edge", EDGES)
def test_block_casts_are_defined_in_every_rounding(edge: str, target: object) -> None:
    given = EDGES[edge]
    assert isinstance(target, type(E4M3))
    for draws in (None, Draws(seed=0, name="w", iteration=1)):
        for keeps_nonzero in (False, True):
            found = quantize_blocks(given, target, draws=draws, keeps_nonzero=keeps_nonzero)
            assert_is_defined(found, given)
            if keeps_nonzero:
                # A block whose scale is at its limit cannot hold the smallest FP32 numbers; their code is kept.
                assert found.codes.to(torch.float32)[given > 0].gt(0).all()


def test_equal_values_have_equal_codes_and_one_scale() -> None:
    for value in (0.0, 0.3, -448.0, LARGEST, 1e-45):
        for target in (E4M3, E5M2, FP16):
            found = quantize_blocks(torch.full((130,), value), target)
            assert len(found.codes.to(torch.float32).unique()) == len(found.scales.unique()) == 1


def test_the_largest_magnitude_of_nothing_finite_is_zero() -> None:
    rows = torch.tensor([[INF, NAN], [-INF, 2.0], [0.0, NAN]])
    assert largest_finite(rows).tolist() == [0.0, 2.0, 0.0]
    assert scales_for(torch.tensor([0.0]), E4M3).tolist() == [127]
    assert largest_finite(torch.empty(3, 0)).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("edge", EDGES)
def test_states_and_compute_weights_are_defined(edge: str, name: str) -> None:
    """State is made from damaged or extreme values, updated, and turned into compute weights."""
    regime, given = REGIMES[name], EDGES[edge].reshape(-1)
    state = ScaledState.of(regime, given, name="w")
    for step in (1, 2):
        weights = compute_weights(regime, state.master)
        decoded = weights.decode()
        assert decoded.isnan().equal(given.isnan())
        if regime.master is not FP32:
            assert decoded[~given.isnan()].isfinite().all() and state.master.decode()[~given.isnan()].isfinite().all()
        update(state, torch.full(given.shape, 1e-3), Hyperparameters(lr=1e-3, weight_decay=0.1), step=step, seed=1)
    assert state.exp_avg.decode().isfinite().all() and state.exp_avg_sq.decode().isfinite().all()


def test_fp16_compute_weights_are_clamped() -> None:
    regime = REGIMES["fp16_fp16_fp16_fp16"]
    state = ScaledState.of(regime, torch.tensor([1e6, -1e6, 1.0]), name="w")
    assert state.master.decode().tolist()[:2] == pytest.approx([1e6, -1e6], rel=1e-3)
    assert state.compute_weights().decode().tolist() == [65504.0, -65504.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_gradients_of_any_dtype_that_are_not_finite_are_refused(value: float, dtype: torch.dtype) -> None:
    for regime in REGIMES.values():
        state = ScaledState.of(regime, torch.ones(1), name="w")
        with pytest.raises(ValueError, match="^w: a gradient is infinite or NaN"):
            update(state, torch.tensor([value], dtype=dtype), Hyperparameters(lr=0.1), step=1)
        assert state.master.decode().item() == 1.0


@pytest.mark.parametrize("eps", [0.0, -1e-8, 1e-50, NAN])
def test_an_epsilon_that_is_zero_in_fp32_is_refused(eps: float) -> None:
    """An element without gradient has both moments zero, so its quotient would be NaN."""
    state = ScaledState.of(REGIMES["fp8_fp8_fp8_fp16"], torch.ones(64), name="w")
    with pytest.raises(ValueError, match=r"^eps=.*: must be at least 2\*\*-126"):
        update(state, torch.zeros(64), Hyperparameters(lr=0.1, eps=eps), step=1)
    assert state.master.decode().eq(1.0).all()


def test_factors_are_finite_for_the_first_and_for_late_updates() -> None:
    for step in (1, 10**9):
        found = Factors.of(Hyperparameters(lr=1e-3), step)
        assert all(math.isfinite(getattr(found, name)) for name in Factors.__slots__)
    assert Factors.of(Hyperparameters(lr=1e-3), 10**9).rate == 1e-3


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_a_bad_row_of_a_layer_spoils_no_other_row(scaling: str) -> None:
    torch.manual_seed(0)
    scalers = LinearScalers.of(TorchProvider(), Recipe(scaling=scaling))
    weight = torch.nn.Parameter(torch.randn(32, 64) * 0.1)
    rows = torch.randn(4, 64)
    clean = linear(rows, weight, scalers)
    rows[1, 5], rows[2, 6] = NAN, INF
    found = linear(rows, weight, scalers)
    assert found[1].isnan().all() and found[[0, 2, 3]].isfinite().all()
    assert found[[0, 3]].equal(clean[[0, 3]])  # neither a NaN nor an infinity changes a scale


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_output_gradients_that_are_not_finite(scaling: str) -> None:
    """An infinite output gradient is clamped like every too large value. A NaN reaches the weight gradient, so that the
    vote skips the update."""
    scalers = LinearScalers.of(TorchProvider(), Recipe(scaling=scaling))
    for value, is_finite in ((INF, True), (LARGEST, True), (NAN, False)):
        weight, rows = torch.nn.Parameter(torch.ones(32, 64)), torch.ones(4, 64, requires_grad=True)
        gradient = torch.ones(4, 32)
        gradient[0, 0] = value
        linear(rows, weight, scalers).backward(gradient)
        assert weight.grad is not None and rows.grad is not None
        if value != LARGEST:  # its products with other values exceed FP32, as without FP8
            assert bool(weight.grad.isfinite().all()) is is_finite
            assert bool(rows.grad[0].isfinite().all()) is is_finite
        assert rows.grad[1:].isfinite().all()

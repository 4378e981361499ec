"""Tests scaled AdamW: against FP32 AdamW, against itself with other shards, and with extreme gradients."""

import random
from itertools import pairwise

import pytest
import torch

from transformer_engine_ext.adamw import Hyperparameters, ScaledState, update
from transformer_engine_ext.codec import pack, unpack
from transformer_engine_ext.formats import E4M3, FP16
from transformer_engine_ext.quantized import byte_view
from transformer_engine_ext.regimes import REGIMES

ACTIVE_AND_FROZEN = {
    "fp16_fp16_fp16_fp16": (6, 2, 3, 0),
    "fp8_fp32_fp32_fp32": (12, 1, 0, 1),
    "fp8_fp16_fp32_fp32": (10, 1, 1, 1),
    "fp8_fp16_fp8_fp16": (5, 1, 3, 1),
    "fp8_fp8_fp8_fp16": (4, 1, 3, 1),
}
VALUES = Hyperparameters(lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("name", REGIMES)
def test_bytes_of_a_regime_are_those_of_its_tensors(name: str) -> None:
    regime = REGIMES[name]
    active, frozen, num_scaled, num_frozen_scaled = ACTIVE_AND_FROZEN[name]
    assert regime.full_bytes == active + num_scaled / 64
    assert regime.frozen_bytes == frozen + num_frozen_scaled / 64
    found = ScaledState.of(regime, torch.randn(6400), name="w")
    assert sum(tensor.nbytes for tensor in found.parts().values()) == 6400 * regime.full_bytes
    assert found.compute_weights().num_bytes == 6400 * regime.frozen_bytes


def gradients(num_elements: int, num_steps: int, seed: int = 0) -> list[torch.Tensor]:
    """Return gradients whose sizes differ by many orders of magnitude within a parameter and between steps."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-9, 1, num_elements)[torch.randperm(num_elements, generator=generator)]
    return [torch.randn(num_elements, generator=generator) * sizes * 3.0**-step for step in range(num_steps)]


def train(state: ScaledState, given: list[torch.Tensor], seed: int | None = 5) -> ScaledState:
    for step, gradient in enumerate(given, 1):
        update(state, gradient, VALUES, step=step, seed=seed)
    return state


def same_bits(one: ScaledState, other: ScaledState) -> bool:
    mine, others = one.parts(), other.parts()
    return all(byte_view(mine[name]).equal(byte_view(others[name])) for name in mine | others)


def test_fp32_state_follows_torch_s_adamw() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1000)
    state = ScaledState.of(REGIMES["fp8_fp32_fp32_fp32"], weight, name="w")
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for gradient in gradients(1000, 30):
        parameter.grad = gradient
        optimizer.step()
    train(state, gradients(1000, 30))
    torch.testing.assert_close(state.master.decode(), parameter.detach(), rtol=2e-6, atol=2e-7)
    for kind in ("exp_avg", "exp_avg_sq"):
        wanted = optimizer.state[parameter][kind]
        torch.testing.assert_close(getattr(state, kind).decode(), wanted, rtol=1e-5, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "most"),
    [("fp16_fp16_fp16_fp16", 0.005), ("fp8_fp16_fp32_fp32", 0.005), ("fp8_fp16_fp8_fp16", 0.06)],
)
def test_low_precision_stays_near_fp32(name: str, most: float) -> None:
    """Gradients of one parameter differ by a factor of 1,000, and decrease by 10 % with each update."""
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 0, 2000)[torch.randperm(2000)]
    weight, given = torch.randn(2000) * 0.1, [torch.randn(2000) * sizes * 0.9**step for step in range(20)]
    exact = train(ScaledState.of(REGIMES["fp8_fp32_fp32_fp32"], weight, name="w"), given).master.decode()
    found = train(ScaledState.of(REGIMES[name], weight, name="w"), given).master.decode()
    error = float((found - exact).norm() / (exact - weight).norm())
    assert 0 < error < most


@pytest.mark.parametrize("name", REGIMES)
def test_no_cut_into_shards_changes_a_bit(name: str) -> None:
    rng = random.Random(name)
    torch.manual_seed(0)
    for trial in range(6):
        size = rng.choice([1, 63, 64, 65, 640, 1000, 4097])
        weight, given = torch.randn(size) * 0.02, gradients(size, 4, seed=trial)
        whole = train(ScaledState.of(REGIMES[name], weight, name="layer.weight"), given)
        for _ in range(4):
            edges = sorted({0, size, *(64 * rng.randrange(1 + size // 64) for _ in range(rng.randrange(5)))})
            for first, last in pairwise(edges):
                shard = ScaledState.of(REGIMES[name], weight[first:last], name="layer.weight", start=first)
                train(shard, [gradient[first:last] for gradient in given])
                assert same_bits(shard, whole.cut(first, last)), (size, first, last)


def test_a_shard_may_be_cut_again_between_updates() -> None:
    torch.manual_seed(0)
    given = gradients(1000, 6)
    regime = REGIMES["fp8_fp8_fp8_fp16"]
    whole = train(ScaledState.of(regime, torch.ones(1000), name="w"), given)
    other = train(ScaledState.of(regime, torch.ones(1000), name="w"), given[:3])
    for step, gradient in enumerate(given[3:], 4):
        for first, last in ((0, 64 * step), (64 * step, 1000)):
            # A cut is a view, so an update of the cut changes the whole.
            update(other.cut(first, last), gradient[first:last], VALUES, step=step, seed=5)
    assert same_bits(whole, other)
    with pytest.raises(AssertionError, match="cuts a block"):
        whole.cut(0, 65)


def test_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    weight, given = torch.randn(100_003), gradients(100_003, 2)
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(train(ScaledState.of(REGIMES["fp8_fp8_fp8_fp16"], weight, name="w"), given))
    finally:
        torch.set_num_threads(before)
    assert same_bits(*found)


def test_stochastic_rounding_moves_weights_that_rounding_to_nearest_leaves() -> None:
    regime, values = REGIMES["fp8_fp8_fp8_fp16"], Hyperparameters(lr=1e-3)
    found = {}
    for seed in (None, 1):
        state = ScaledState.of(regime, torch.ones(64_000), name="w")
        for step in range(1, 11):
            update(state, torch.ones(64_000), values, step=step, seed=seed)
        found[seed] = float(state.master.decode().mean())
    assert found[None] == 1.0  # each update is below half of the distance between two codes
    assert found[1] == pytest.approx(0.99, abs=1e-3)


def test_replay_from_captured_bytes_is_equal() -> None:
    given = gradients(640, 8)
    for name, regime in REGIMES.items():
        state = train(ScaledState.of(regime, torch.ones(640), name="w"), given[:4])
        entries, buffer = pack(state.parts())
        for step, gradient in enumerate(given[4:], 5):
            update(state, gradient, VALUES, step=step, seed=5)
        again = ScaledState.from_parts(regime, unpack(entries, buffer), name="w", start=0)
        for step, gradient in enumerate(given[4:], 5):
            update(again, gradient, VALUES, step=step, seed=5)
        assert same_bits(state, again), name


EXTREMES = {
    "zero": torch.zeros(100),
    "overflow of the square": torch.full((100,), 1e30),
    "largest": torch.full((100,), torch.finfo(torch.float32).max),
    "underflow of the square": torch.full((100,), 1e-30),
    "subnormal": torch.full((100,), 1e-42),
    "all equal": torch.full((100,), 0.5),
    "mixed": torch.tensor([1e30, 1e-30, 0.0, -1e30, 1.0] * 20),
}


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_gradients_move_a_weight_by_at_most_a_few_learning_rates(extreme: str, name: str) -> None:
    state = ScaledState.of(REGIMES[name], torch.full((100,), 0.5), name="w")
    gradient = EXTREMES[extreme]
    for step in range(1, 6):
        update(state, gradient, Hyperparameters(lr=1e-3), step=step, seed=1)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert getattr(state, kind).decode().isfinite().all(), kind
    assert (state.exp_avg_sq.decode() >= 0).all()
    # An FP8 master moves by whole codes, whose distance at 0.5 is 1/16.
    spacing = {E4M3: 0.0626, FP16: 0.001}.get(state.regime.master, 0.0)
    assert (state.master.decode() - 0.5).abs().max() <= 5 * 1e-3 * 1.8 + 2 * spacing
    if extreme == "zero":
        assert state.master.decode().eq(0.5).all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    for regime in REGIMES.values():
        state = train(ScaledState.of(regime, torch.ones(70), name="w"), gradients(70, 2))
        before = {name: tensor.clone() for name, tensor in state.parts().items()}
        gradient = torch.ones(70)
        gradient[69] = value
        with pytest.raises(ValueError, match="^w: a gradient is infinite or NaN"):
            update(state, gradient, VALUES, step=3, seed=5)
        assert all(byte_view(before[name]).equal(byte_view(tensor)) for name, tensor in state.parts().items())


def test_one_element_and_none() -> None:
    for regime in REGIMES.values():
        one = train(ScaledState.of(regime, torch.tensor([0.25]), name="w"), [torch.tensor([1.0])] * 3)
        assert 0.0 < float(one.master.decode()) < 0.25
        train(ScaledState.of(regime, torch.empty(0), name="w"), [torch.empty(0)] * 2)


def test_fp8_masters_are_the_compute_weights() -> None:
    state = ScaledState.of(REGIMES["fp8_fp8_fp8_fp16"], torch.randn(100), name="w")
    assert state.compute_weights() is state.master
    for name in ("fp8_fp32_fp32_fp32", "fp8_fp16_fp8_fp16"):
        found = ScaledState.of(REGIMES[name], torch.randn(100), name="w").compute_weights()
        assert found.format is E4M3 and found.scales.shape == (2,)
    found = ScaledState.of(REGIMES["fp16_fp16_fp16_fp16"], torch.randn(100), name="w").compute_weights()
    assert found.format is FP16 and found.scales.numel() == 0

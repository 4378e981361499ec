"""Tests casts, scales, quantized tensors and recipes: edge cases, exactness, and scales that no shard changes."""

import math

import pytest
import torch

from transformer_engine_ext.formats import E4M3, E5M2, FORMATS, FP16, FP32, Draws, Format, cast, cast_stochastically
from transformer_engine_ext.quantized import (
    BLOCK_ELEMENTS,
    QuantizedTensor,
    byte_view,
    factors_of,
    quantize_blocks,
    scales_for,
)
from transformer_engine_ext.recipes import AmaxHistory, Recipe

LOW = (E4M3, E5M2, FP16)
INF, NAN = float("inf"), float("nan")


def all_values(target: Format) -> torch.Tensor:
    """Return every finite value of a format, sorted, FP32."""
    codes = torch.arange(1 << (8 * target.item_bytes), dtype=torch.int32)
    narrow = codes.to(torch.uint8) if target.item_bytes == 1 else codes.to(torch.int16)
    values = narrow.view(target.dtype).to(torch.float32)
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("target", LOW, ids=lambda found: found.name)
def test_the_table_of_formats_describes_torch_s_formats(target: Format) -> None:
    values = all_values(target)
    assert values.max() == target.largest
    assert values[values > 0].min() == target.smallest
    above_one = values[values > 1.0].min()
    assert above_one == 1.0 + 2.0**-target.mantissa_bits
    assert FORMATS[target.name] is target


@pytest.mark.parametrize("target", LOW, ids=lambda found: found.name)
def test_a_cast_clamps_and_makes_no_nan(target: Format) -> None:
    given = torch.tensor([INF, -INF, 1e38, -1e38, 2 * target.largest, target.smallest / 4, 0.0, -0.0, NAN])
    found = cast(given, target).to(torch.float32)
    largest = target.largest
    assert found[:5].tolist() == [largest, -largest, largest, -largest, largest]
    assert found[5:8].tolist() == [0.0, 0.0, 0.0] and math.copysign(1.0, found[7]) == -1.0
    assert found[8].isnan()
    stochastic = cast_stochastically(given, target, torch.full(given.shape, 0xFFFFFFFF)).to(torch.float32)
    assert stochastic[:5].equal(found[:5]) and stochastic[8].isnan() and stochastic[:8].isfinite().all()


@pytest.mark.parametrize("target", LOW, ids=lambda found: found.name)
def test_every_value_of_a_format_survives_both_casts(target: Format) -> None:
    values = all_values(target)
    for bits in (0, 0x7FFFFFFF, 0xFFFFFFFF):
        drawn = cast_stochastically(values, target, torch.full(values.shape, bits))
        assert drawn.to(torch.float32).equal(values)
    assert cast(values, target).to(torch.float32).equal(values)


@pytest.mark.parametrize("target", LOW, ids=lambda found: found.name)
def test_stochastic_rounding_is_unbiased_and_chooses_a_neighbour(target: Format) -> None:
    values = all_values(target)
    values = values[:: max(1, len(values) // 200)]
    below, above = values[:-1], values[1:]
    for share in (0.125, 0.5, 0.8125):
        given = below + (above - below) * share
        draws = [
            cast_stochastically(
                given, target, Draws(seed=seed, name="w", iteration=1).bits(0, len(given), given.device)
            )
            for seed in range(400)
        ]
        # The neighbours of a value between two sampled values are closer than these: bracket by rounding both ways.
        down = cast_stochastically(given.abs(), target, torch.zeros(given.shape, dtype=torch.int64)).to(torch.float32)
        up = cast_stochastically(given.abs(), target, torch.full(given.shape, 0xFFFFFFFF)).to(torch.float32)
        found = torch.stack([drawn.to(torch.float32).abs() for drawn in draws])
        assert ((found == down) | (found == up)).all()
        expected = torch.where(up > down, (given.abs() - down) / (up - down), 0.0)
        observed = ((found == up) & (up > down)).to(torch.float32).mean(dim=0)
        assert (observed - expected).abs().max() < 5 * math.sqrt(0.25 / 400)
        assert abs((observed - expected).mean()) < 0.02


def test_random_numbers_depend_on_all_four_inputs_and_on_nothing_else() -> None:
    base = Draws(seed=1, name="layer.weight", iteration=7)
    whole = base.bits(0, 1000, torch.device("cpu"))
    assert whole.min() >= 0 and whole.max() < 1 << 32 and len(whole.unique()) > 990
    assert base.bits(320, 100, torch.device("cpu")).equal(whole[320:420])
    for other in (
        Draws(seed=2, name="layer.weight", iteration=7),
        Draws(seed=1, name="layer.weights", iteration=7),
        Draws(seed=1, name="layer.weight", iteration=8),
    ):
        assert (other.bits(0, 1000, torch.device("cpu")) == whole).sum() < 3
    mean = base.bits(0, 200_000, torch.device("cpu")).double().mean() / 2**32
    assert abs(mean - 0.5) < 0.004


@pytest.mark.parametrize("target", LOW, ids=lambda found: found.name)
def test_scales_are_the_smallest_that_do_not_overflow(target: Format) -> None:
    amax = torch.cat([torch.logspace(-30, 30, 500), torch.tensor([448.0, 448.1, 57344.0, 65504.0, 65505.0])])
    factors = factors_of(scales_for(amax, target))
    assert (torch.frexp(factors).mantissa == 0.5).all()
    assert (amax / factors <= target.largest).all()
    assert (amax / (factors / 2) > target.largest).all()


EDGES = {
    "zeros": torch.zeros(130),
    "negative zeros": -torch.zeros(64),
    "all equal": torch.full((200,), 0.3),
    "one element": torch.tensor([-3.7e-5]),
    "empty": torch.empty(0),
    "largest": torch.full((70,), torch.finfo(torch.float32).max),
    "subnormal": torch.full((70,), 1e-42),
    "infinite": torch.tensor([INF, -INF, 1.0, -2.0]),
    "nan": torch.tensor([NAN, 1.0, 100.0]),
    "wide": torch.logspace(-44, 38, 128),
}


@pytest.mark.parametrize("target", LOW, ids=lambda found: found.name)
@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_make_no_nan_and_stay_in_range(edge: str, target: Format) -> None:
    given = EDGES[edge]
    for draws in (None, Draws(seed=0, name="w", iteration=1)):
        found = quantize_blocks(given, target, draws=draws)
        assert found.scales.shape == (-(-len(given) // BLOCK_ELEMENTS),)
        decoded = found.decode()
        assert decoded.isnan().equal(given.isnan())
        assert decoded[~given.isnan()].isfinite().all()
        finite = given.isfinite()
        largest = given[finite].abs().max() if finite.any() else torch.tensor(0.0)
        # Scales stop where a decoded value would exceed FP32.
        most = target.largest * 2.0 ** (128 - math.frexp(target.largest)[1])
        error = (decoded - given.clamp(-most, most)).abs()[finite]
        assert (error <= largest * 2.0**-target.mantissa_bits + 2.0**-126).all()


def test_a_block_with_an_infinity_is_scaled_by_its_finite_values() -> None:
    found = quantize_blocks(torch.tensor([INF, -INF, 1.0, -2.0]), E4M3).decode()
    assert found.tolist() == [3.5, -3.5, 1.0, -2.0]  # 448 * 2**-7, where the largest finite value is 2


def test_a_second_moment_above_zero_does_not_become_zero() -> None:
    given = torch.tensor([1.0, 1e-30, 0.0])
    assert quantize_blocks(given, FP16).decode()[1] == 0.0
    kept = quantize_blocks(given, FP16, keeps_nonzero=True).decode()
    assert kept[1] > 0.0 and kept[2] == 0.0 and kept[0] == 1.0


def test_bf16_holds_decoded_fp8_values_exactly() -> None:
    found = quantize_blocks(torch.randn(1000) * torch.logspace(-6, 6, 1000), E4M3)
    assert found.decode(torch.bfloat16).to(torch.float32).equal(found.decode())


def test_scales_do_not_depend_on_cuts_at_blocks() -> None:
    values = torch.randn(1000) * torch.logspace(-3, 3, 1000)
    whole = quantize_blocks(values, E4M3)
    parts = [quantize_blocks(values[a:b], E4M3, start=a) for a, b in ((0, 64), (64, 640), (640, 1000))]
    assert torch.cat([byte_view(part.codes) for part in parts]).equal(byte_view(whole.codes))
    assert torch.cat([part.scales for part in parts]).equal(whole.scales)
    with pytest.raises(AssertionError, match="inside a block"):
        quantize_blocks(values[65:], E4M3, start=65)


def test_a_copy_through_bf16_would_change_codes_of_some_tensors() -> None:
    """This is why windows contain codes and scales. The largest value of the block rounds down across a power of two of
    the scale, so that quantizing again chooses a smaller scale."""
    values = torch.full((64,), 0.01)
    values[0] = 1.76  # above 448 / 256, so the scale doubles; the code is 1.75
    first = quantize_blocks(values, E4M3)
    again = quantize_blocks(first.decode(torch.bfloat16).to(torch.float32), E4M3)
    assert not first.equal(again)
    assert first.equal(QuantizedTensor(codes=first.codes.clone(), scales=first.scales.clone(), block_elements=64))


def test_fp32_state_has_no_scales_and_keeps_its_bits() -> None:
    values = torch.randn(100)
    found = quantize_blocks(values, FP32)
    assert found.scales.numel() == 0 and found.decode().equal(values) and found.codes is not values


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise", "delayed"])
def test_a_recipe_gives_each_role_its_format(scaling: str) -> None:
    recipe = Recipe(scaling=scaling)
    scalers = AmaxHistory.of(recipe, num_iterations=1) if scaling == "delayed" else recipe
    values = torch.randn(8, 32)
    for role, wanted in (("weight", E4M3), ("input", E4M3), ("output_gradient", E5M2)):
        found = scalers.scaler(role).quantize(values)
        assert found.format is wanted and found.shape == values.shape
        assert found.scales.numel() == (4 if scaling == "blockwise" else 1)
    assert Recipe(scaling=scaling, is_hybrid=False).formats["output_gradient"] is E4M3
    for other in ("mxfp8", "delayed"):
        with pytest.raises(ValueError, match=f"^scaling={other}: must be"):
            Recipe(scaling=other).scaler("weight")


def test_delayed_scaling_uses_the_magnitudes_of_earlier_iterations() -> None:
    history = AmaxHistory.of(Recipe(scaling="delayed"), num_iterations=3)
    scaler = history.scaler("input")
    first = scaler.quantize(torch.tensor([1000.0, 1.0]))
    assert first.decode().tolist() == [448.0, 1.0]  # the scale is 1, and the value is clamped
    scaler.quantize(torch.tensor([20.0]))  # another microbatch of the iteration
    history.advance()
    history.begin()
    assert scaler.quantize(torch.tensor([1000.0])).decode().item() == pytest.approx(1000.0, rel=0.03)
    history.advance()
    history.begin()
    assert history.history[:, 0, 1].tolist() == [1000.0, 1000.0, 0.0]
    scaler.quantize(torch.tensor([2.0, INF, NAN]))
    history.advance()
    assert history.history[:, 0, 1].tolist() == [2.0, 1000.0, 1000.0]
    assert history.history[:, 0, [0, 2]].eq(0).all()  # the other roles

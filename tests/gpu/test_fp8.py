"""Tests FP8 state on a GPU: casts, products and scaled AdamW have the bits or the numbers of the CPU, with the fused
kernel of ``csrc/adamw`` too, and masters move as those of Transformer Engine's FusedAdam."""

import importlib
from typing import Any

import pytest
import torch

from megatron_ft.runtime.dispatch import extension
from transformer_engine_ext.adamw import REFERENCE, Backend, Hyperparameters, ScaledState, update
from transformer_engine_ext.codec import pack, unpack
from transformer_engine_ext.formats import E4M3, E5M2, FP16, FP32, Draws, Format
from transformer_engine_ext.kernels import BackendError, backend_for
from transformer_engine_ext.linear import LinearScalers, linear
from transformer_engine_ext.providers import TorchProvider, transformer_engine_problem
from transformer_engine_ext.quantized import QuantizedTensor, byte_view, quantize_blocks
from transformer_engine_ext.recipes import AmaxHistory, Recipe
from transformer_engine_ext.regimes import REGIMES

pytestmark = pytest.mark.timeout(300)
GPU, KERNEL = "cuda", "cuda"
SCALINGS = ("tensorwise", "blockwise", "delayed")
VALUES = Hyperparameters(lr=1e-2, weight_decay=0.1)
SIZES = (1, 63, 64, 65, 1000, 100_003)


@pytest.fixture(scope="module")
def kernel() -> Backend:
    return backend_for(KERNEL, torch.device(GPU), extension.load)


@pytest.fixture
def provider() -> TorchProvider:
    found = TorchProvider()
    refusal = found.refusal(Recipe(scaling="tensorwise"), torch.device(GPU))
    if refusal is not None:
        pytest.skip(refusal)
    return found


def wide(num_elements: int, low: float, high: float) -> torch.Tensor:
    """Return numbers whose magnitudes have all powers of ten from ``low`` to ``high``."""
    sizes = torch.logspace(low, high, num_elements)[torch.randperm(num_elements)]
    return torch.randn(num_elements) * sizes


def assert_same_codes(found: QuantizedTensor, wanted: QuantizedTensor) -> None:
    assert byte_view(found.codes).cpu().equal(byte_view(wanted.codes)) and found.scales.cpu().equal(wanted.scales)


@pytest.mark.parametrize("target", [E4M3, E5M2, FP16], ids=lambda found: found.name)
@pytest.mark.parametrize("draws", [None, Draws(seed=3, name="w", iteration=2)], ids=["nearest", "stochastic"])
def test_casts_have_the_bits_of_the_cpu(target: Format, draws: Draws | None) -> None:
    torch.manual_seed(0)
    values = torch.cat([wide(100_000, -44, 38), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    found = quantize_blocks(values.to(GPU), target, draws=draws, keeps_nonzero=True)
    wanted = quantize_blocks(values, target, draws=draws, keeps_nonzero=True)
    assert_same_codes(found, wanted)
    assert found.decode().cpu().equal(wanted.decode())
    assert found.decode().isfinite().all()


def history_of(recipe: Recipe, device: str) -> AmaxHistory | None:
    return AmaxHistory.of(recipe, num_iterations=2, device=device) if recipe.scaling == "delayed" else None


@pytest.mark.parametrize("scaling", SCALINGS)
def test_recipes_have_the_codes_and_the_history_of_the_cpu(scaling: str) -> None:
    torch.manual_seed(0)
    recipe = Recipe(scaling=scaling)
    histories = [history_of(recipe, device) for device in (GPU, "cpu")]
    for role in ("weight", "input", "output_gradient"):
        mine, other = ((history or recipe).scaler(role) for history in histories)
        for _ in range(3):
            values = wide(4096, -6, 3).view(64, 64).to(torch.bfloat16)
            assert_same_codes(mine.quantize(values.to(GPU)), other.quantize(values))
            for history in filter(None, histories):
                history.advance()
                history.begin()
        if histories[0] is not None and histories[1] is not None:
            assert histories[0].history.cpu().equal(histories[1].history)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 128, 32), (1, 1, 1), (0, 8, 4), (3, 64, 1), (100, 1000, 52)])
def test_products_are_those_of_the_decoded_operands(
    provider: TorchProvider, scaling: str, shape: tuple[int, int, int]
) -> None:
    """``torch._scaled_mm`` needs multiples of 16 on a GPU; other sizes are padded."""
    torch.manual_seed(0)
    m, k, n = shape
    for role in ("input", "output_gradient"):
        recipe = Recipe(scaling=scaling)
        scalers = history_of(recipe, GPU) or recipe
        left = scalers.scaler(role).quantize(torch.randn(m, k, device=GPU) * 3)
        right = scalers.scaler("weight").quantize(torch.randn(n, k, device=GPU) * 0.02)
        wanted = (left.decode().double() @ right.decode().double().t()).float()
        found = provider.product(left, right, torch.bfloat16)
        assert found.shape == (m, n) and found.dtype is torch.bfloat16
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_layers_have_the_gradients_of_the_cpu_and_frozen_ones_have_none(provider: TorchProvider, scaling: str) -> None:
    torch.manual_seed(0)
    weight, rows, gradient = torch.randn(48, 40) * 0.1, torch.randn(24, 40), torch.randn(24, 48)
    results: list[list[torch.Tensor]] = []
    for device in (GPU, "cpu"):
        recipe = Recipe(scaling=scaling)
        scalers = LinearScalers.of(provider, recipe, history_of(recipe, device))
        parameter = torch.nn.Parameter(weight.to(device, torch.bfloat16))
        leaf = rows.to(device, torch.bfloat16).requires_grad_()
        output = linear(leaf, parameter, scalers)
        output.backward(gradient.to(device, torch.bfloat16))
        assert leaf.grad is not None and parameter.grad is not None
        results.append([found.detach().float().cpu() for found in (output, leaf.grad, parameter.grad)])
        again = rows.to(device, torch.bfloat16).requires_grad_()
        linear(again, parameter.detach(), scalers).backward(gradient.to(device, torch.bfloat16))
        assert again.grad is not None
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


def states(regime: str, values: torch.Tensor, start: int = 0) -> tuple[ScaledState, ScaledState]:
    """Return the same state on the GPU and on the CPU."""
    first, second = (
        ScaledState.of(REGIMES[regime], values.to(device), name="w", start=start) for device in (GPU, "cpu")
    )
    return first, second


def assert_same_bits(found: ScaledState, wanted: ScaledState) -> None:
    mine, others = found.parts(), wanted.parts()
    for kind in mine | others:
        assert byte_view(mine[kind]).cpu().equal(byte_view(others[kind])), kind


@pytest.mark.parametrize("name", ["torch", KERNEL])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("regime", REGIMES)
def test_updates_have_the_bits_of_the_cpu(regime: str, seed: int | None, name: str, kernel: Backend) -> None:
    torch.manual_seed(1)
    backend = REFERENCE if name == "torch" else kernel
    for size in SIZES:
        mine, other = states(regime, wide(size, -12, 3), start=64 << 34)
        for step in range(1, 5):
            gradient = wide(size, -44, 30)
            update(mine, gradient.to(GPU), VALUES, step=step, seed=seed, backend=backend)
            update(other, gradient, VALUES, step=step, seed=seed)
        assert_same_bits(mine, other)


@pytest.mark.parametrize("regime", REGIMES)
def test_shards_have_the_bits_of_the_whole_and_a_replay_repeats_them(regime: str, kernel: Backend) -> None:
    torch.manual_seed(2)
    cut, whole = states(regime, torch.randn(1000))
    given = [wide(1000, -9, 1) for _ in range(6)]
    captured: Any = None
    for step, gradient in enumerate(given, 1):
        edge = 64 * step
        for first, last in ((0, edge), (edge, 1000)):
            part = gradient[first:last].to(GPU)
            update(cut.cut(first, last), part, VALUES, step=step, seed=1, backend=kernel)
        update(whole, gradient, VALUES, step=step, seed=1)
        if step == 3:
            captured = pack({kind: found.cpu() for kind, found in cut.parts().items()})
    assert_same_bits(cut, whole)
    again = {kind: found.to(GPU) for kind, found in unpack(*captured).items()}
    replayed = ScaledState.from_parts(REGIMES[regime], again, name="w", start=0)
    for step, gradient in enumerate(given[3:], 4):
        update(replayed, gradient.to(GPU), VALUES, step=step, seed=1, backend=kernel)
    assert_same_bits(replayed, whole)


def test_the_kernel_writes_nothing_outside_its_range(kernel: Backend) -> None:
    """State of a range in the middle of larger buffers, whose last block is not full."""
    torch.manual_seed(3)
    whole, _ = states("fp8_fp8_fp8_fp16", torch.randn(1000))
    before = {kind: part.clone() for kind, part in whole.parts().items()}
    found = {kind: part[5:7] if kind.endswith("_scales") else part[320:420] for kind, part in whole.parts().items()}
    inside = ScaledState.from_parts(REGIMES["fp8_fp8_fp8_fp16"], found, name="w", start=320)
    update(inside, torch.ones(100, device=GPU), VALUES, step=1, seed=1, backend=kernel)
    for kind, part in whole.parts().items():
        first, last = (5, 7) if kind.endswith("_scales") else (320, 420)
        changed = (byte_view(part).view(len(part), -1) != byte_view(before[kind]).view(len(part), -1)).any(dim=1)
        assert not changed[:first].any() and not changed[last:].any(), kind
        assert changed[first:last].any() or kind.endswith("_scales"), kind


def test_the_kernel_runs_on_the_callers_stream(kernel: Backend) -> None:
    mine, other = states("fp8_fp32_fp32_fp32", torch.randn(4096))
    gradient = torch.zeros(4096, device=GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        gradient.fill_(1.0)
        update(mine, gradient, VALUES, step=1, backend=kernel)
    stream.synchronize()
    update(other, torch.ones(4096), VALUES, step=1)
    assert_same_bits(mine, other)


def test_bad_gradients_and_state_in_host_memory_are_refused(kernel: Backend) -> None:
    mine, other = states("fp8_fp8_fp8_fp16", torch.ones(70))
    gradient = torch.ones(70)
    gradient[69] = torch.nan
    with pytest.raises(ValueError, match="^w: a gradient is infinite or NaN"):
        update(mine, gradient.to(GPU), VALUES, step=1, backend=kernel)
    assert_same_bits(mine, other)
    with pytest.raises(BackendError, match="^backend=cuda: w is on cpu"):
        update(other, torch.ones(70), VALUES, step=1, backend=kernel)


def fused_adam() -> Any:
    problem = transformer_engine_problem()
    if problem is not None:
        pytest.skip(f"needs a complete transformer_engine>=2.9,<2.12: {problem}")
    return importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam


@pytest.mark.parametrize(
    ("regime", "most"),
    [
        ("fp16_fp16_fp16_fp16", 0.01),
        ("fp8_fp32_fp32_fp32", 1e-4),
        ("fp8_fp16_fp32_fp32", 0.01),
        ("fp8_fp16_fp8_fp16", 0.1),
    ],
)
def test_masters_move_as_those_of_fused_adam(regime: str, most: float, kernel: Backend) -> None:
    """FusedAdam has one FP32 scale for each tensor, so that its low-precision state is rounded elsewhere. Its masters
    cannot be FP8. ``most`` is the largest allowed relative difference of all movements after 20 updates."""
    optimizer_class, formats = fused_adam(), REGIMES[regime]
    dtypes = {FP32: torch.float32, FP16: torch.float16, E4M3: torch.uint8}
    torch.manual_seed(0)
    parameter = torch.nn.Parameter((torch.randn(4096, device=GPU) * 0.1).to(torch.bfloat16))
    start = parameter.detach().float()
    optimizer = optimizer_class(
        [parameter],
        lr=VALUES.lr,
        betas=(VALUES.beta1, VALUES.beta2),
        eps=VALUES.eps,
        weight_decay=VALUES.weight_decay,
        master_weights=True,
        use_decoupled_grad=True,
        master_weight_dtype=dtypes[formats.master],
        exp_avg_dtype=dtypes[formats.exp_avg],
        exp_avg_sq_dtype=dtypes[formats.exp_avg_sq],
    )
    state = ScaledState.of(formats, start.clone(), name="w")
    sizes = torch.logspace(-2, 0, 4096, device=GPU)[torch.randperm(4096, device=GPU)]
    for step in range(1, 21):
        gradient = torch.randn(4096, device=GPU) * sizes * 0.9**step
        parameter.decoupled_grad = gradient.clone()  # type: ignore[attr-defined]
        optimizer.step()
        update(state, gradient, VALUES, step=step, backend=kernel)
    wanted = optimizer.get_unscaled_state(parameter, "master_param") - start
    moved = state.master.decode() - start
    assert float((moved - wanted).norm() / wanted.norm()) < most

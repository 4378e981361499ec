"""Tests that the fused kernel of scaled AdamW, compiled for C++, has the bits of the reference, and that backends are
chosen by name. ``tests/gpu/test_fp8.py`` repeats the comparison with CUDA."""

import ctypes
import math
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_ft.errors import SoftwareError
from megatron_ft.runtime.dispatch import extension
from transformer_engine_ext.adamw import REFERENCE, Hyperparameters, ScaledState, update
from transformer_engine_ext.formats import E4M3, FP16, FP32, Draws, Format, cast, cast_stochastically
from transformer_engine_ext.kernels import BackendError, KernelBackend, _Factors, _Range, backend_for
from transformer_engine_ext.quantized import byte_view
from transformer_engine_ext.regimes import REGIMES

CPU = torch.device("cpu")
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module")
def kernel() -> KernelBackend:
    found = backend_for("cpp", CPU, extension.load)
    assert isinstance(found, KernelBackend)
    return found


def many_values() -> torch.Tensor:
    """Return FP32 numbers of every exponent and sign, with the significands around every code of FP16 and E4M3 and
    around every middle between two codes."""
    steps = torch.arange(0, 1 << 23, 1 << 12, dtype=torch.int64)
    significands = torch.cat([steps, steps + 1, (steps - 1) % (1 << 23)])
    exponents = torch.arange(0, 256, dtype=torch.int64)
    bits = (exponents[:, None] << 23 | significands).reshape(-1)
    bits = torch.cat([bits, bits | 1 << 31])
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("target", [FP16, E4M3], ids=lambda found: found.name)
def test_casts_have_the_bits_of_torch_for_every_exponent(kernel: KernelBackend, target: Format) -> None:
    values = many_values()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 1 << 32, values.shape, generator=generator)
    for random_bits in (None, drawn, torch.zeros_like(drawn), torch.full_like(drawn, 0xFFFFFFFF)):
        wanted = cast(values, target) if random_bits is None else cast_stochastically(values, target, random_bits)
        narrow = None if random_bits is None else random_bits.to(torch.uint32)
        found = torch.empty(values.shape, dtype=target.dtype)
        code = kernel.library.adamw_cast(
            ctypes.c_int64({FP16: 1, E4M3: 2}[target]),
            ctypes.c_void_p(values.data_ptr()),
            ctypes.c_void_p(None if narrow is None else narrow.data_ptr()),
            ctypes.c_int64(values.numel()),
            ctypes.c_void_p(found.data_ptr()),
        )
        assert code == 0
        is_nan = values.isnan()
        assert found.to(torch.float32).isnan().equal(is_nan)  # only a NaN becomes a NaN; which NaN is not defined
        numbers = ~is_nan
        assert (
            byte_view(found)
            .view(-1, target.item_bytes)[numbers]
            .equal(byte_view(wanted).view(-1, target.item_bytes)[numbers])
        )


def states(regime: str, values: torch.Tensor, start: int = 0) -> tuple[ScaledState, ScaledState]:
    first, second = (ScaledState.of(REGIMES[regime], values, name="w", start=start) for _ in range(2))
    return first, second


def assert_same_bits(one: ScaledState, other: ScaledState, where: object = "") -> None:
    mine, others = one.parts(), other.parts()
    for kind in mine | others:
        assert byte_view(mine[kind]).equal(byte_view(others[kind])), (kind, where)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", [None, 7])
def test_updates_have_the_bits_of_the_reference(kernel: KernelBackend, regime: str, seed: int | None) -> None:
    rng = random.Random(regime)
    torch.manual_seed(1)
    for size in (0, 1, 63, 64, 65, 1000, 20_003):
        wide = torch.logspace(-12, 3, size)[torch.randperm(size)]
        one, other = states(regime, torch.randn(size) * wide, start=64 * rng.randrange(1 << 32))
        for step in range(1, 9):
            # Some moments underflow, some gradients are clamped, and some elements have no gradient.
            gradient = torch.randn(size) * torch.logspace(-44, 30, size)[torch.randperm(size)]
            gradient[torch.rand(size) < 0.1] = 0.0
            values = Hyperparameters(lr=rng.uniform(1e-4, 0.1), weight_decay=rng.choice([0.0, 0.1]))
            for state, backend in ((one, REFERENCE), (other, kernel)):
                update(state, gradient, values, step=step, seed=seed, backend=backend)
            assert_same_bits(one, other, (size, step))


EXTREMES = {
    "zero": torch.zeros(100),
    "largest": torch.full((100,), torch.finfo(torch.float32).max),
    "subnormal": torch.full((100,), 1e-42),
    "all equal": torch.full((100,), 0.5),
    "mixed": torch.tensor([1e30, 1e-30, 0.0, -1e30, 1.0] * 20),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("regime", REGIMES)
def test_extreme_states_have_the_bits_of_the_reference(kernel: KernelBackend, regime: str, extreme: str) -> None:
    for values in EXTREMES.values():
        one, other = states(regime, values)
        for step in range(1, 4):
            for state, backend in ((one, REFERENCE), (other, kernel)):
                update(state, EXTREMES[extreme], Hyperparameters(lr=1e-3), step=step, seed=3, backend=backend)
        assert_same_bits(one, other)


@pytest.mark.parametrize("regime", REGIMES)
def test_damaged_masters_spoil_only_their_own_elements(kernel: KernelBackend, regime: str) -> None:
    """A NaN or an infinity in restored masters stays in its element, with both backends."""
    weights = torch.ones(128)
    weights[5], weights[6] = NAN, INF
    one, other = states(regime, weights)
    for state, backend in ((one, REFERENCE), (other, kernel)):
        update(state, torch.ones(128), Hyperparameters(lr=1e-3), step=1, backend=backend)
        master = state.master.decode()
        assert master.isnan().nonzero().tolist() == [[5]]
        assert master[64:].isfinite().all() and not bool((master[7:] > 1.0).any())
    assert one.master.decode().nan_to_num(7.0).equal(other.master.decode().nan_to_num(7.0))


def test_shards_and_views_have_the_bits_of_the_whole(kernel: KernelBackend) -> None:
    torch.manual_seed(2)
    one, other = states("fp8_fp8_fp8_fp16", torch.randn(1000))
    for step in range(1, 6):
        gradient = torch.randn(2000)[::2]  # not contiguous
        update(one, gradient, Hyperparameters(lr=0.01), step=step, seed=1)
        edge = 64 * step
        for first, last in ((0, edge), (edge, 1000)):
            update(
                other.cut(first, last),
                gradient[first:last],
                Hyperparameters(lr=0.01),
                step=step,
                seed=1,
                backend=kernel,
            )
    assert_same_bits(one, other)


def test_gradients_in_bf16_and_bad_gradients_are_treated_as_by_the_reference(kernel: KernelBackend) -> None:
    one, other = states("fp8_fp16_fp8_fp16", torch.ones(70))
    for state, backend in ((one, REFERENCE), (other, kernel)):
        update(state, torch.full((70,), 0.3, dtype=torch.bfloat16), Hyperparameters(lr=0.1), step=1, backend=backend)
    assert_same_bits(one, other)
    bad = torch.ones(70)
    bad[69] = NAN
    with pytest.raises(ValueError, match="^w: a gradient is infinite or NaN"):
        update(other, bad, Hyperparameters(lr=0.1), step=2, backend=kernel)
    assert_same_bits(one, other)


def test_formats_of_no_regime_are_refused(kernel: KernelBackend) -> None:
    mixed = ScaledState(
        regime=REGIMES["fp16_fp16_fp16_fp16"],
        name="w",
        start=0,
        master=states("fp8_fp32_fp32_fp32", torch.ones(64))[0].master,
        exp_avg=states("fp8_fp8_fp8_fp16", torch.ones(64))[0].exp_avg,
        exp_avg_sq=states("fp8_fp32_fp32_fp32", torch.ones(64))[0].exp_avg_sq,
    )
    assert mixed.master.format is FP32
    with pytest.raises(
        BackendError, match=r"^backend=cpp: the update of w failed: no precision regime has this combination"
    ):
        update(mixed, torch.ones(64), Hyperparameters(lr=0.1), step=1, backend=kernel)


def test_backends_are_chosen_by_name_and_replaced_by_no_other() -> None:
    assert backend_for("torch", torch.device("cuda"), lambda kind: pytest.fail("loaded")) is REFERENCE
    with pytest.raises(BackendError, match=r"^backend=triton: must be one of torch, cpp, cuda$"):
        backend_for("triton", CPU, extension.load)
    with pytest.raises(BackendError, match=r"^backend=cuda: updates state on cuda, not on cpu; use torch$"):
        backend_for("cuda", CPU, extension.load)
    with pytest.raises(BackendError, match=r"^backend=cpp: updates state on cpu, not on cuda; use torch$"):
        backend_for("cpp", torch.device("cuda"), extension.load)
    kernel = KernelBackend(name="cuda", library=ctypes.CDLL(None))
    with pytest.raises(BackendError, match=r"^backend=cuda: w is on cpu; use the backend torch there$"):
        update(
            states("fp8_fp8_fp8_fp16", torch.ones(64))[0],
            torch.ones(64),
            Hyperparameters(lr=0.1),
            step=1,
            backend=kernel,
        )


def test_structures_have_the_layout_of_the_header() -> None:
    text = (extension.SOURCES / "adamw" / "update.hpp").read_text(encoding="utf-8")
    content = text.partition("struct Range {")[2].partition("};")[0]
    names = [name for name, _ in _Range._fields_]
    places = [content.index(f" {name}{end}") for name in names for end in (",", ";") if f" {name}{end}" in content]
    assert len(places) == len(names) and places == sorted(places)
    of_factors = text.partition("struct Factors {")[2].partition("};")[0]
    found = [of_factors.index(f" {name}") for name, _ in _Factors._fields_]
    assert found == sorted(found) and ctypes.sizeof(_Range) == 8 + 3 * 16 + 4 * 8 + 8 * 4


def test_random_numbers_of_large_parameters_are_equal(kernel: KernelBackend) -> None:
    """The counter of an element exceeds 32 bits."""
    start = 1 << 40
    draws = Draws(seed=1, name="w", iteration=1)
    assert draws.bits(start, 4, CPU).tolist() != draws.bits(0, 4, CPU).tolist()
    one, other = states("fp8_fp8_fp8_fp16", torch.linspace(-1, 1, 640), start=start)
    for state, backend in ((one, REFERENCE), (other, kernel)):
        update(state, torch.ones(640), Hyperparameters(lr=1e-2), step=1, seed=1, backend=backend)
    assert_same_bits(one, other)


def test_fp8_masters_follow_fp32_masters_on_average(kernel: KernelBackend) -> None:
    """FP8 masters cannot follow a single trajectory: 16 updates move a weight by less than the distance of two codes.
    Stochastic rounding is unbiased, so that the mean of 128 seeds moves as FP32 masters do, within 2 %."""
    torch.manual_seed(0)
    weight = torch.full((64 * 64,), 0.8125)
    given = [torch.rand(weight.shape) + 0.5 for _ in range(16)]
    moved = {}
    for name, seeds in (("fp8_fp32_fp32_fp32", range(1)), ("fp8_fp8_fp8_fp16", range(128))):
        total = torch.zeros_like(weight)
        for seed in seeds:
            state = ScaledState.of(REGIMES[name], weight, name="w")
            for step, gradient in enumerate(given, 1):
                update(state, gradient, Hyperparameters(lr=2e-3), step=step, seed=seed, backend=kernel)
            total += state.master.decode() - weight
        moved[name] = float(total.mean()) / len(seeds)
    exact = moved["fp8_fp32_fp32_fp32"]
    assert -0.0625 < exact < -0.02
    assert moved["fp8_fp8_fp8_fp16"] == pytest.approx(exact, rel=0.02)


def test_cuda_rounds_every_operation_and_contracts_none(tmp_path: Path) -> None:
    """The instructions of the kernel are those of IEEE 754, even if the compiler may contract products and sums."""
    try:
        nvcc = extension._find_compiler("cuda")
    except SoftwareError as missing:
        pytest.skip(f"needs nvcc: {missing}")
    out = tmp_path / "update.ptx"
    source = extension.SOURCES / "adamw" / "update.cu"
    command = [*nvcc, "-std=c++17", "-O3", "-fmad=true", "-arch=sm_90", "-ptx", str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"\.entry .*?\n}", out.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(kernels) == len(REGIMES)
    for text in kernels:
        found = set(re.findall(r"\b((?:mul|add|sub|div|sqrt|fma|mad|rcp|rsqrt)[.\w]*\.f32)\b", text))
        assert found == {"mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
        assert ".ftz" not in text and ".approx" not in text and ".f64" not in text

"""Tests the count of floating-point operations, by hand, and the peak rates of GPUs."""

from dataclasses import replace

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import ModelConfig, PrecisionConfig
from megatron_ft.events import RunStarted
from megatron_ft.mcore.training.reporting import Throughput, TokenFlops, peak_tflops


def test_a_published_model() -> None:
    """Mixtral 8x7B has 12.88 billion active parameters; six operations for each of them without the embedding."""
    model = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        seq_length=4096,
        moe_ffn_hidden_size=14336,
    )
    found = TokenFlops.of(model, 32000)
    assert found.total - found.scores == 6 * 32 * (4096 * 6144 + 4096 * 4096 + 2 * 3 * 4096 * 14336 + 8 * 4096) + (
        6 * 4096 * 32000
    )
    assert found.scores == 6 * 32 * 4096 * 4096
    assert (found.total - found.scores) / 6 == pytest.approx(12.88e9 - 4096 * 32000, rel=1e-3)
    assert TokenFlops.of(replace(model, seq_length=8192), 32000).scores == 2 * found.scores


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", PrecisionConfig(params_dtype="bf16"), 989.4),
        ("NVIDIA H100 80GB HBM3", PrecisionConfig(params_dtype="bf16", fp8="hybrid"), 1979.0),
        ("NVIDIA H100 PCIe", PrecisionConfig(params_dtype="bf16"), 756.0),
        ("NVIDIA H200", PrecisionConfig(), 66.9),
        ("NVIDIA A100-SXM4-80GB", PrecisionConfig(params_dtype="fp16"), 312.0),
        ("NVIDIA A100-SXM4-80GB", PrecisionConfig(params_dtype="bf16", fp8="e4m3"), None),
        ("Tesla V100-SXM2-32GB", PrecisionConfig(params_dtype="bf16"), None),
        ("NVIDIA GeForce RTX 4090", PrecisionConfig(params_dtype="bf16"), None),
        (None, PrecisionConfig(), None),
    ],
)
def test_peak_rates_by_name(name: str | None, precision: PrecisionConfig, peak: float | None) -> None:
    assert peak_tflops(None, name, precision) == peak
    assert peak_tflops(123.0, name, precision) == 123.0


def test_rates_of_an_iteration() -> None:
    config = JobConfig()
    config.telemetry.peak_tflops = 2.0
    config.launch.ranks_per_gpu = 2
    per_sample = TokenFlops.of(config.model, 512).total * config.model.seq_length
    on_gpus = Throughput.of(config, 512, "NVIDIA H200").figures(16, 2000, 0.5, world_size=4)
    assert on_gpus["tokens_per_second_per_gpu"] == 2000.0, "four ranks share two GPUs"
    assert on_gpus["tflops_per_gpu"] == pytest.approx(per_sample * 16 / 0.5 / 2 / 1e12)
    assert on_gpus["mfu"] == on_gpus["tflops_per_gpu"] / 2.0
    config.telemetry.peak_tflops = None
    on_cpus = Throughput.of(config, 512, None).figures(16, 2000, 0.5, world_size=4)
    assert on_cpus["tokens_per_second_per_gpu"] == 1000.0 and "mfu" not in on_cpus


@pytest.mark.parametrize(
    ("device", "peak", "is_said"),
    [("cuda: NVIDIA T4", None, True), ("cuda: NVIDIA H200", 989.4, False), ("cpu", None, False), (None, None, False)],
)
def test_the_start_says_that_there_is_no_mfu(device: str | None, peak: float | None, is_said: bool) -> None:
    record = RunStarted(run_name="a", model="b", world_size=1, device=device, peak_tflops=peak)
    assert ("set telemetry.peak_tflops" in record.describe().text) == is_said

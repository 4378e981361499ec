"""Tests products of quantized matrices, and that providers refuse by name what they cannot do."""

from pathlib import Path

import pytest
import torch

from transformer_engine_ext.providers import (
    Provider,
    ProviderError,
    TorchProvider,
    provider_for,
    transformer_engine_problem,
)
from transformer_engine_ext.recipes import AmaxHistory, Recipe

CPU = torch.device("cpu")


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise", "delayed"])
@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 128, 32), (1, 1, 1), (0, 8, 4), (3, 64, 1)])
def test_a_product_is_that_of_the_decoded_operands(scaling: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    m, k, n = shape
    recipe = Recipe(scaling=scaling)
    provider = provider_for("torch", recipe, CPU)
    scalers = AmaxHistory.of(recipe, num_iterations=1) if scaling == "delayed" else recipe
    for role in ("input", "output_gradient"):
        left = scalers.scaler(role).quantize(torch.randn(m, k) * 3)
        right = scalers.scaler("weight").quantize(torch.randn(n, k) * 0.02)
        found = provider.product(left, right, torch.float32)
        wanted = left.decode().double() @ right.decode().double().t()
        assert found.shape == (m, n)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
        assert provider.product(left, right, torch.bfloat16).dtype is torch.bfloat16


def test_unknown_recipes_and_providers_are_refused_by_name() -> None:
    with pytest.raises(ProviderError, match=r"^recipe=mxfp8: the provider torch has no mxfp8 scaling"):
        provider_for("torch", Recipe(scaling="mxfp8"), CPU)
    with pytest.raises(ProviderError, match=r"^recipe=tensorwise: .* not on meta"):
        provider_for("torch", Recipe(scaling="tensorwise"), torch.device("meta"))
    with pytest.raises(ProviderError, match=r"^provider=cublas: must be torch or transformer_engine"):
        provider_for("cublas", Recipe(scaling="tensorwise"), CPU)
    provider: Provider = TorchProvider()
    assert provider.refusal(Recipe(scaling="delayed"), CPU) is None


def install(folder: Path, name: str, version: str) -> None:
    """Make a distribution ``name`` that importlib.metadata finds in ``folder``."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def test_transformer_engine_is_described_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if transformer_engine_problem() != "transformer_engine is not installed":
        pytest.skip("Transformer Engine is installed here")
    install(tmp_path, "transformer_engine", "2.11.0")
    assert "transformer_engine_torch is not installed" in str(transformer_engine_problem())
    install(tmp_path, "transformer_engine_torch", "2.11.0")
    assert "cannot be imported (ModuleNotFoundError" in str(transformer_engine_problem())
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('cudnn shared object not found')\n", encoding="utf-8")
    assert "RuntimeError: cudnn shared object" in str(transformer_engine_problem())
    with pytest.raises(ProviderError, match=r"^provider=transformer_engine: .*; use provider=torch$"):
        provider_for("transformer_engine", Recipe(scaling="tensorwise"), CPU)


@pytest.mark.parametrize("version", ["2.8.1", "2.12.0", "2.20.2", "1.13.0", "unknown"])
def test_other_versions_of_transformer_engine_are_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("transformer_engine", "transformer_engine_torch"):
        install(tmp_path, name, version)
    assert f"transformer_engine {version} is not supported" in str(transformer_engine_problem())

"""Providers of FP8 matrix products behind one protocol: ``torch`` (CPU and CUDA) and ``transformer_engine``.

A provider states which scaling recipes it does not support on a device, and why. An unsupported recipe is an error: no
other provider and no higher precision is used instead.
"""

import contextlib
import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Protocol

import torch

from transformer_engine_ext.quantized import QuantizedTensor
from transformer_engine_ext.recipes import Recipe

_TE_DISTRIBUTIONS = ("transformer_engine", "transformer_engine_torch")
_TE_FROM, _TE_BELOW = (2, 9), (2, 12)


class ProviderError(RuntimeError):
    """Raised if a provider of FP8 products cannot be used, or does not support the scaling recipe."""


class Provider(Protocol):
    """Computes matrix products of quantized matrices (FP8)."""

    @property
    def name(self) -> str:
        """Name of the provider, as in the configuration."""

    def refusal(self, recipe: Recipe, device: torch.device) -> str | None:
        """Return why the provider does not support ``recipe`` on ``device``, or None if the provider supports it."""

    def product(
        self,
        left: QuantizedTensor,
        right: QuantizedTensor,
        dtype: torch.dtype,
        *,
        is_left_transposed: bool = False,
        is_right_transposed: bool = False,
    ) -> torch.Tensor:
        """Return ``left @ right.T`` in ``dtype``, accumulated in FP32.

        Args:
            left: ``[m, k]``, or ``[k, m]`` if ``is_left_transposed``.
            right: ``[n, k]``, or ``[k, n]`` if ``is_right_transposed``.

        Returns:
            ``[m, n]``.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchProvider:
    """Computes FP8 products with ``torch._scaled_mm``. For blockwise scales, decodes and multiplies the operands."""

    name: str = "torch"

    def refusal(self, recipe: Recipe, device: torch.device) -> str | None:
        """Return why ``recipe`` is not supported on ``device``, or None, as :class:`Provider` describes."""
        if recipe.scaling not in ("tensorwise", "blockwise", "delayed"):
            return f"the provider torch has no {recipe.scaling} scaling; use tensorwise, blockwise or delayed"
        if device.type not in ("cpu", "cuda"):
            return f"the provider torch computes on cpu and cuda, not on {device.type}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "FP8 products need a GPU with compute capability 8.9 or later"
        return None

    def product(
        self,
        left: QuantizedTensor,
        right: QuantizedTensor,
        dtype: torch.dtype,
        *,
        is_left_transposed: bool = False,
        is_right_transposed: bool = False,
    ) -> torch.Tensor:
        """Return ``left @ right.T`` in ``dtype``, as :class:`Provider` describes."""
        assert left.codes.dim() == right.codes.dim() == 2, "operands must be matrices"
        if left.block_elements is not None or right.block_elements is not None:
            # Codes of FP8 times a power of two are exact in BF16, so the products are those of FP8 operands.
            exact = torch.float32 if left.codes.device.type == "cpu" else torch.bfloat16
            rows, columns = left.decode(exact), right.decode(exact)
            rows = rows.t() if is_left_transposed else rows
            return (rows @ (columns if is_right_transposed else columns.t())).to(dtype)
        # One scale for the tensor is also the scale of the transposed tensor.
        rows = left.codes.t().contiguous() if is_left_transposed else left.codes
        columns = right.codes.t().contiguous() if is_right_transposed else right.codes
        size = (rows.shape[0], columns.shape[0])
        if 0 in (*size, rows.shape[1]):  # e.g. an expert without tokens
            return torch.zeros(size, dtype=dtype, device=rows.device)
        if rows.device.type == "cuda":
            # cuBLAS needs multiples of 16. Zeros add nothing to a sum.
            rows, columns = _padded(rows), _padded(columns)
        found: torch.Tensor = torch._scaled_mm(
            rows,
            columns.t(),
            scale_a=left.factors.reshape(()),
            scale_b=right.factors.reshape(()),
            out_dtype=dtype,
        )
        return found[: size[0], : size[1]]


def _padded(codes: torch.Tensor) -> torch.Tensor:
    missing = [-length % 16 for length in codes.shape]
    if not any(missing):
        return codes.contiguous()
    found = codes.new_zeros([length + more for length, more in zip(codes.shape, missing, strict=True)])
    found[: codes.shape[0], : codes.shape[1]] = codes
    return found


def transformer_engine_problem() -> str | None:
    """Return why the installed Transformer Engine cannot be used, or None if it is complete and can be imported.

    The import of an incomplete installation raises errors of many types. Without this check, Megatron would raise them.
    """
    versions: dict[str, str] = {}
    for name in _TE_DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    missing = [name for name in _TE_DISTRIBUTIONS if name not in versions]
    if len(missing) == len(_TE_DISTRIBUTIONS):
        return "transformer_engine is not installed"
    if missing:
        return f"transformer_engine is incomplete: {missing[0]} is not installed; install it, or remove the rest"
    try:
        number = tuple(int(part) for part in versions["transformer_engine"].split(".")[:2])
    except ValueError:
        number = ()
    if not _TE_FROM <= number < _TE_BELOW:
        return f"transformer_engine {versions['transformer_engine']} is not supported; install >=2.9,<2.12"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # noqa: BLE001 - RuntimeError, FileNotFoundError, OSError and others have been seen
        return f"transformer_engine cannot be imported ({type(error).__name__}: {error}); reinstall or remove it"
    return None


def provider_for(name: str, recipe: Recipe, device: torch.device) -> Provider:
    """Return the provider of FP8 products ``name``, after a check that it supports ``recipe`` on ``device``.

    Raises:
        ProviderError: there is no such provider, or it does not support the recipe on ``device``.
            ``transformer_engine`` is always refused, because snapshots of its layers are not supported yet.
    """
    if name == "transformer_engine":
        # Capture and restore of the state of Transformer Engine's layers has not been tested on a GPU yet.
        problem = transformer_engine_problem() or "snapshots of its layers are not supported yet"
        raise ProviderError(f"provider={name}: {problem}; use provider=torch")
    if name != "torch":
        raise ProviderError(f"provider={name}: must be torch or transformer_engine")
    provider = TorchProvider()
    refusal = provider.refusal(recipe, device)
    if refusal is not None:
        raise ProviderError(f"recipe={recipe.scaling}: {refusal}")
    return provider

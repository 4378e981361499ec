"""The five low-precision regimes of MoEvement's table 7, with the formats of each kind of state and their bytes."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformer_engine_ext.formats import E4M3, FP16, FP32, Format
from transformer_engine_ext.quantized import BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Formats of compute weights, master weights and both moments. FP8 is E4M3 for all of them."""

    compute: Format
    master: Format
    exp_avg: Format
    exp_avg_sq: Format

    @property
    def is_compute_scaled(self) -> bool:
        """Whether compute weights have scales. FP8 weights have scales; layers use FP16 weights without scales."""
        return self.compute is E4M3

    def full(self) -> Iterator[tuple[str, Format, bool]]:
        """Yield (component, format, whether it has scales) of an active operator. Compute weights are not included,
        because they follow from master weights."""
        for name in ("master", "exp_avg", "exp_avg_sq"):
            found: Format = getattr(self, name)
            yield name, found, found.is_scaled

    def frozen(self) -> Iterator[tuple[str, Format, bool]]:
        """Yield (component, format, whether it has scales) of a frozen operator."""
        yield "weight", self.compute, self.is_compute_scaled

    @property
    def full_bytes(self) -> float:
        """Bytes per parameter of an active operator, with scales."""
        return _bytes(self.full())

    @property
    def frozen_bytes(self) -> float:
        """Bytes per parameter of a frozen operator, with scales."""
        return _bytes(self.frozen())


def _bytes(components: Iterator[tuple[str, Format, bool]]) -> float:
    return sum(found.item_bytes + has_scales / BLOCK_ELEMENTS for _, found, has_scales in components)


REGIMES = {
    "fp16_fp16_fp16_fp16": Regime(compute=FP16, master=FP16, exp_avg=FP16, exp_avg_sq=FP16),
    "fp8_fp32_fp32_fp32": Regime(compute=E4M3, master=FP32, exp_avg=FP32, exp_avg_sq=FP32),
    "fp8_fp16_fp32_fp32": Regime(compute=E4M3, master=FP16, exp_avg=FP32, exp_avg_sq=FP32),
    "fp8_fp16_fp8_fp16": Regime(compute=E4M3, master=FP16, exp_avg=E4M3, exp_avg_sq=FP16),
    "fp8_fp8_fp8_fp16": Regime(compute=E4M3, master=E4M3, exp_avg=E4M3, exp_avg_sq=FP16),
}
"""Regimes in the order of the table. A name is compute_master_exp_avg_exp_avg_sq."""

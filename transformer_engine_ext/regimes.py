"""Five precision regimes (table 7 of the MoEvement paper): number formats of weights and moments, and their bytes."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformer_engine_ext.formats import E4M3, FP16, FP32, Format
from transformer_engine_ext.quantized import BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Number formats of compute weights (of the forward pass), master weights and moments. FP8 is always E4M3."""

    compute: Format
    master: Format
    exp_avg: Format
    exp_avg_sq: Format

    @property
    def is_compute_scaled(self) -> bool:
        """Whether compute weights have scales. FP8 compute weights have scales, FP16 compute weights have none."""
        return self.compute is E4M3

    def full(self) -> Iterator[tuple[str, Format, bool]]:
        """Yield, for each tensor of an operator's full state, its name, its format and whether it has scales. Compute
        weights are not included, because they can be computed from master weights."""
        for name in ("master", "exp_avg", "exp_avg_sq"):
            found: Format = getattr(self, name)
            yield name, found, found.is_scaled

    def frozen(self) -> Iterator[tuple[str, Format, bool]]:
        """Yield name and format of compute weights (a frozen operator's only state), and whether they have scales."""
        yield "weight", self.compute, self.is_compute_scaled

    @property
    def full_bytes(self) -> float:
        """Bytes per parameter of the full state (master weights and moments), including scales."""
        return _bytes(self.full())

    @property
    def frozen_bytes(self) -> float:
        """Bytes per parameter of the compute weights, the only state of a frozen operator, including scales."""
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
"""All regimes. A name lists the formats of compute weights, master weights, first moment and second moment."""

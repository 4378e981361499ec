"""Number formats (group ``precision``)."""

from dataclasses import dataclass


@dataclass
class PrecisionConfig:
    """Formats of compute weights, gradients and FP8, and loss scaling."""

    params_dtype: str = "fp32"
    """Format of compute weights and activations: ``fp32``, ``bf16`` or ``fp16``."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in FP32."""
    fp8: str | None = None
    """``e4m3`` or ``hybrid``; null for none. Needs a provider (Transformer Engine)."""
    fp8_recipe: str = "tensorwise"
    """``tensorwise``, ``blockwise``, ``delayed`` or ``mxfp8``."""
    loss_scale: float | None = None
    """Fixed loss scale for ``fp16``; null scales dynamically."""
    initial_loss_scale: float = 65536.0
    """First dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: int = 1000
    """Iterations without overflow before the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Number of overflows before the dynamic loss scale halves."""

"""Number formats (group ``precision``)."""

from dataclasses import dataclass


@dataclass
class PrecisionConfig:
    """Number formats of weights, activations and gradients, and loss scaling."""

    params_dtype: str = "fp32"
    """Format of compute weights and activations: ``fp32``, ``bf16`` or ``fp16``."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in FP32 instead of ``params_dtype``."""
    fp8: str | None = None
    """FP8 format, ``e4m3`` or ``hybrid``. Must be null, because this version cannot train with FP8."""
    fp8_recipe: str = "tensorwise"
    """Scaling recipe of FP8: ``tensorwise``, ``blockwise``, ``delayed`` or ``mxfp8``."""
    loss_scale: float | None = None
    """Constant loss scale for ``fp16``; null uses dynamic loss scaling."""
    initial_loss_scale: float = 65536.0
    """Dynamic loss scale at the start."""
    min_loss_scale: float = 1.0
    """Lower limit of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Number of iterations without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Number of overflows after which the dynamic loss scale halves."""

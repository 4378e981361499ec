"""Optimizer and learning-rate schedule (group ``optimizer``)."""

from dataclasses import dataclass

MAX_DEFAULT_WARMUP = 10
"""Default iterations of warm-up."""


@dataclass
class OptimizerConfig:
    """AdamW with gradient clipping and a learning-rate schedule."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Final learning rate."""
    lr_warmup_iterations: int | None = None
    """Iterations of linear warm-up from ``lr_warmup_init``. null means 10, but at most a sixth of the iterations of
    decay."""
    lr_warmup_init: float = 0.0
    """Learning rate of the first warm-up iteration. With 0, that iteration changes no weight, as in Megatron."""
    lr_decay_style: str = "cosine"
    """``constant``, ``linear``, ``cosine``, ``inverse-square-root`` or ``WSD``."""
    lr_decay_iterations: int | None = None
    """Iterations until ``min_lr``; null means ``training.train_iterations``."""
    lr_wsd_decay_iterations: int | None = None
    """Length of the final decay of ``WSD``."""
    lr_wsd_decay_style: str = "exponential"
    """Shape of the final decay of ``WSD``: ``exponential``, ``linear``, ``cosine`` or ``minus_sqrt``."""
    weight_decay: float = 0.1
    """Decoupled weight decay; biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Term added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def num_decay_iterations(self, train_iterations: int) -> int:
        """Return the number of iterations until ``min_lr``."""
        return train_iterations if self.lr_decay_iterations is None else self.lr_decay_iterations

    def num_warmup_iterations(self, train_iterations: int) -> int:
        """Return the number of warm-up iterations."""
        if self.lr_warmup_iterations is not None:
            return self.lr_warmup_iterations
        return min(MAX_DEFAULT_WARMUP, self.num_decay_iterations(train_iterations) // 6)

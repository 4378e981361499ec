"""Optimizer and learning-rate schedule (group ``optimizer``)."""

from dataclasses import dataclass

MAX_DEFAULT_WARMUP = 10
"""Largest default for ``lr_warmup_iterations``."""


@dataclass
class OptimizerConfig:
    """AdamW with gradient clipping and a learning-rate schedule."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Final learning rate of the schedule."""
    lr_warmup_iterations: int | None = None
    """Iterations of linear warm-up from ``lr_warmup_init``; null: a sixth of ``lr_decay_iterations``, at most 10."""
    lr_warmup_init: float = 0.0
    """Learning rate of the first warm-up iteration. With 0, the first iteration changes no weight, as in Megatron."""
    lr_decay_style: str = "cosine"
    """Shape of the schedule: ``constant``, ``linear``, ``cosine``, ``inverse-square-root`` or ``WSD``."""
    lr_decay_iterations: int | None = None
    """Iteration at which the learning rate reaches ``min_lr``; null means ``training.train_iterations``."""
    lr_wsd_decay_iterations: int | None = None
    """Number of iterations of the final decay with ``lr_decay_style=WSD``."""
    lr_wsd_decay_style: str = "exponential"
    """Shape of the final decay of ``WSD``: ``exponential``, ``linear``, ``cosine`` or ``minus_sqrt``."""
    weight_decay: float = 0.1
    """Decoupled weight decay. It does not apply to biases and norms."""
    adam_beta1: float = 0.9
    """Decay rate of the first moment."""
    adam_beta2: float = 0.95
    """Decay rate of the second moment."""
    adam_eps: float = 1e-8
    """Term added to the square root of the second moment (epsilon)."""
    clip_grad: float = 1.0
    """Limit to which the global gradient norm is clipped; 0 turns clipping off."""

    def num_decay_iterations(self, train_iterations: int) -> int:
        """Return the iteration at which the learning rate reaches ``min_lr``."""
        return train_iterations if self.lr_decay_iterations is None else self.lr_decay_iterations

    def num_warmup_iterations(self, train_iterations: int) -> int:
        """Return the number of warm-up iterations."""
        if self.lr_warmup_iterations is not None:
            return self.lr_warmup_iterations
        return min(MAX_DEFAULT_WARMUP, self.num_decay_iterations(train_iterations) // 6)

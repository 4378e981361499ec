"""Norm layers for Megatron's local layer spec. Megatron's own torch norm does not support sequence parallelism."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelNorm:
    """Creates a torch LayerNorm or RMSNorm, as configured. It is a class because a layer spec needs a class.

    With sequence parallelism, the parameters are marked ``sequence_parallel``, so that Megatron sums their gradients
    over the tensor-parallel ranks.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

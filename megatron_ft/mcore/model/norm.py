"""Norms of the local layer spec. Megatron's own torch norm refuses sequence parallelism."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelNorm:
    """Makes a torch LayerNorm or RMSNorm from the configuration; a layer spec needs a class.

    If sequences are split over tensor-parallel ranks, the parameters are marked ``sequence_parallel``, so that Megatron
    sums their gradients over those ranks.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        """Create a norm over the last ``hidden_size`` channels."""
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

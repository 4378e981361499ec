"""Text and tokens before training: tokenizers, indexed datasets, the order of samples. No torch, no Megatron."""

"""Text and tokens before training: tokenizers, indexed datasets and the order of samples. It does not import torch."""

"""Training data: tokenizers, indexed datasets and the order of samples. This package does not import torch."""

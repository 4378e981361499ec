"""Reads the samples of a job with Megatron's ``IndexedDataset``, and makes microbatches from them."""

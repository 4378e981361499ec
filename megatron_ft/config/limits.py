"""Limits of memory (group ``limits``)."""

from dataclasses import dataclass


@dataclass
class LimitsConfig:
    """Memory of a GPU and of a node, which the plan must not exceed."""

    gpu_memory_bytes: int | None = None
    """Memory of one GPU, as a limit of the plan. Null: a start on CUDA asks ``nvidia-smi``, and a dry run notes that
    GPU memory is not checked."""
    host_memory_bytes: int | None = None
    """Memory of one node, as a limit of the plan; null takes this machine's in mode ``local``."""

"""Limits of memory (group ``limits``)."""

from dataclasses import dataclass


@dataclass
class LimitsConfig:
    """Memory of a GPU and of a node, which the plan must not exceed."""

    gpu_memory_bytes: int | None = None
    """Memory of one GPU, as a limit of the plan. null: a start on CUDA asks ``nvidia-smi``. A dry run with null notes
    that GPU memory is not checked."""
    host_memory_bytes: int | None = None
    """Memory of one node, as a limit of the plan. null means the memory of this machine in mode ``local``."""

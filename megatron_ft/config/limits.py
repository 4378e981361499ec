"""Limits of memory, with which the plan is compared (group ``limits``)."""

from dataclasses import dataclass


@dataclass
class LimitsConfig:
    """Memory of a GPU and of a node. A job whose plan needs more is refused."""

    gpu_memory_bytes: int | None = None
    """Memory of one GPU. null: a job on CUDA queries ``nvidia-smi``, and a dry run checks no GPU memory."""
    host_memory_bytes: int | None = None
    """Host memory of one node. In mode ``local``, null means the memory of this machine."""

"""Fixes that Megatron-Core needs on every device before it can train."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ft.doctor.devices import observe_devices


def install() -> None:
    """Define the name ``te_general_gemm`` in Megatron's ``moe_utils`` if it is missing. A second call has no effect.

    ``moe_utils`` imports ``te_general_gemm`` after ``transformer_engine`` in one ``try`` block. Without Transformer
    Engine the name is not defined, and each call of the router's gating raises NameError. For Megatron, the value None
    means that the kernel does not exist.
    """
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def num_visible_gpus() -> int:
    """Return the number of GPUs that PyTorch would find, according to the driver's files. CUDA is not initialised."""
    return observe_devices(os.environ.get("CUDA_VISIBLE_DEVICES")).usable_gpus()


@contextlib.contextmanager
def answering_for_devices(*, has_gpu: bool) -> Iterator[None]:
    """Make ``torch.cuda.is_available()`` return ``has_gpu`` while the block runs, without using the CUDA runtime.
    Modules of Megatron and PyTorch call ``is_available`` when they are imported. If a process uses the CUDA runtime
    before it forks, its children cannot use CUDA."""
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: has_gpu
    try:
        yield
    finally:
        torch.cuda.is_available = is_available

"""Requirements of Megatron-Core 0.16.1 on every device before it can train."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ft.doctor.devices import observe_devices
from megatron_ft.planning.devices import usable_gpus


def install() -> None:
    """Bind names that Megatron reads although the import that binds them has failed. May be called again.

    ``megatron.core.transformer.moe.moe_utils`` imports ``te_general_gemm`` after ``transformer_engine`` in one ``try``
    block. Without Transformer Engine the name is never bound, and each call of the router's gating raises NameError.
    Megatron takes None to mean that the kernel does not exist.
    """
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def num_visible_gpus() -> int:
    """Count the GPUs that PyTorch would find, by the driver's files, without CUDA's runtime."""
    return usable_gpus(observe_devices(os.environ.get("CUDA_VISIBLE_DEVICES")))


@contextlib.contextmanager
def answering_for_devices(*, has_gpu: bool) -> Iterator[None]:
    """Answer imports that ask whether there is a GPU, without asking CUDA's runtime.

    Modules of Megatron and of PyTorch ask when they are imported. CUDA's runtime would answer, but a forked process
    cannot use it after its parent has, and it may start threads, which are lost in a fork.
    """
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: has_gpu
    try:
        yield
    finally:
        torch.cuda.is_available = is_available

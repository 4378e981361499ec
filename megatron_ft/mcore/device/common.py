"""What Megatron-Core 0.16.1 needs on every device before it can train."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch


def install() -> None:
    """Bind names that Megatron reads although the import that binds them has failed. May be called again.

    ``megatron.core.transformer.moe.moe_utils`` imports ``te_general_gemm`` after ``transformer_engine`` in one ``try``
    block. Without Transformer Engine the name is never bound, and each call of the router's gating raises NameError.
    Megatron reads None as "there is no such kernel".
    """
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@contextlib.contextmanager
def answering_for_devices() -> Iterator[None]:
    """Let imports in a process that ranks on CUDA are forked from find that there is a GPU, without asking for it.

    Modules of Megatron and of PyTorch ask when they are imported. The answer would come from CUDA's runtime, which a
    forked process cannot use once its parent has.
    """
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = is_available

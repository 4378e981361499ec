"""What Megatron-Core 0.16.1 needs on every device before it can train."""

import importlib
from typing import Any


def install() -> None:
    """Bind names that Megatron reads although the import that binds them has failed. May be called again.

    ``megatron.core.transformer.moe.moe_utils`` imports ``te_general_gemm`` after ``transformer_engine`` in one ``try``
    block. Without Transformer Engine the name is never bound, and each call of the router's gating raises NameError.
    Megatron reads None as "there is no such kernel".
    """
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

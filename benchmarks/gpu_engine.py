"""Shared parts of the claims about GPUs: the device, a training engine of one rank on it, and the reports of a stage.

On a machine without a GPU the quick variants run the same code on the CPU; figures from a CPU are not meaningful.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ft.control.ports import free_port

SLICE = {
    "model.num_layers": 2,
    "model.hidden_size": 2048,
    "model.num_attention_heads": 16,
    "model.seq_length": 2048,
    "model.ffn_hidden_size": 8192,
    "model.moe_ffn_hidden_size": 1408,
    "model.num_moe_experts": 16,
    "model.moe_router_topk": 4,
    "precision.params_dtype": "bf16",
    "training.transformer_impl": "local",
}
"""Two layers with the width of DeepSeekMoE-16B and a quarter of its experts: the part that one GPU of eight has."""


def slice_words() -> list[str]:
    """Return ``SLICE`` as overrides of the real program."""
    return [f"{key}={value}" for key, value in SLICE.items()]


def device_type() -> str:
    """Return ``cuda`` or ``cpu``."""
    from tools.gpu import warm

    return warm.device_type


def open_engine(overrides: Mapping[str, Any], *, quick: bool) -> Any:
    """Return a built engine of one rank in this process, with a small model if ``quick``. It exists until the process
    ends."""
    from megatron_ft.config.serialize import from_dict
    from tools.gpu import ranks

    small = {} if quick else SLICE
    job = from_dict(ranks.config_for(device_type(), {**small, **overrides}))
    return ranks.open_engine(ranks.Place(rank=0, world_size=1, port=free_port("127.0.0.1")), job)


@contextmanager
def stage(seconds: float) -> Iterator[Any]:
    """Yield the context of a GPU-day stage, for claims that repeat the work of a stage. Its folder is removed after the
    block."""
    from tools.gpu.day import Day

    with tempfile.TemporaryDirectory(prefix="gpu-claim-") as folder:
        path = Path(folder)
        yield Day(device_type=device_type(), folder=path, shared=path, deadline=time.monotonic() + seconds)

"""What the claims about a GPU share: the device, a training engine of one rank on it, and a stage's side of a day.

On a machine without a GPU the quick variants run the same code on the CPU; what they measure there says nothing.
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
"""Two layers of the width of DeepSeekMoE-16B with a quarter of its experts: what one GPU of eight has."""


def slice_words() -> list[str]:
    """The same as overrides of the real program."""
    return [f"{key}={value}" for key, value in SLICE.items()]


def device_type() -> str:
    """``cuda`` or ``cpu``."""
    from tools.gpu import warm

    return warm.device_type


def open_engine(overrides: Mapping[str, Any], *, quick: bool) -> Any:
    """A built engine of one rank in this process; small where ``quick``. The process ends with it."""
    import os

    import torch.distributed as dist

    from megatron_ft.config.serialize import from_dict
    from megatron_ft.mcore.device.install import install, take_device
    from megatron_ft.mcore.groups import form_groups
    from megatron_ft.mcore.loop.engine import TrainingEngine
    from megatron_ft.mcore.loop.main import _prepare_process
    from megatron_ft.planning.rank_environment import rank_environment
    from tests.helpers.engines import VOCAB_SIZE, MadeUpSamples
    from tools.gpu import ranks

    small = {} if quick else SLICE
    job = from_dict(ranks.config_for(device_type(), {**small, **overrides}))
    for name, value in rank_environment(job, 0).items():
        os.environ.setdefault(name, value)
    device = take_device(job, node=0, local_rank=0)
    kind, transformer_impl = install(job)
    _prepare_process(job)
    store = dist.TCPStore("127.0.0.1", free_port("127.0.0.1"), 1, is_master=True)
    groups = form_groups(job.parallel, store=store, rank=0, world_size=1, generation=0, device=kind, timeout_seconds=60)
    samples = MadeUpSamples(job.model.seq_length)
    splits = {"train": samples, "valid": samples}
    engine = TrainingEngine(
        job, device=device, transformer_impl=transformer_impl, vocab_size=VOCAB_SIZE, samples=splits
    )
    engine.build(groups)
    return engine


@contextmanager
def stage(seconds: float) -> Iterator[Any]:
    """A stage's side of a GPU day, for claims that repeat what a stage does; its folder ends with the block."""
    from tools.gpu.day import Day

    with tempfile.TemporaryDirectory(prefix="gpu-claim-") as folder:
        path = Path(folder)
        yield Day(device_type=device_type(), folder=path, shared=path, deadline=time.monotonic() + seconds)

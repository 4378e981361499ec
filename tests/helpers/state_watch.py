"""Records where the tensors of a rank are, and what it communicates while it recovers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

INCOMING = (
    "recv",
    "alltoall_base",
    "all_to_all_single",
    "all_gather_single",
    "all_gather_single_coalesced",
    "broadcast",
)
"""Methods of process groups that deliver tensors of other ranks. Records are exchanged with ``allgather``."""


def watch(report: Callable[[dict[str, Any]], None]) -> None:
    """Call ``report`` with a record of kind ``addresses`` after every iteration, and with one of kind ``communicated``
    after every recovery: bytes by method, without collectives of one rank."""
    from megatron_ft.mcore.recovery.replicas import ElasticTrainer
    from megatron_ft.mcore.state.tensors import named_state
    from megatron_ft.mcore.training.engine import TrainingEngine
    from megatron_ft.runtime.transport.handles import FORWARDED, Handle

    counts: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(handle: Any, *args: Any, **kwargs: Any) -> Any:
            if handle.size() > 1:
                counts[name] += _num_bytes(args[0])
            return method(handle, *args, **kwargs)

        return counted

    for name in FORWARDED:
        if name in vars(Handle) and name not in ("barrier", "_get_backend", "_get_backend_name"):
            setattr(Handle, name, counting(name, getattr(Handle, name)))

    run_iteration, recover = TrainingEngine.run_iteration, ElasticTrainer._recover_in_place

    def run_and_tell(engine: Any, iteration: int) -> Any:
        result = run_iteration(engine, iteration)
        tensors = dict(named_state(engine.model_chunks, engine.optimizer))
        for number, chunk in enumerate(engine.model_chunks):
            for place, buffer in enumerate((*chunk.buffers, *chunk.expert_parallel_buffers)):
                tensors[f"gradients.{number}.{place}"] = buffer.grad_data
        where = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        report({"kind": "addresses", "generation": engine.groups.generation, "iteration": iteration, "where": where})
        return result

    def recover_and_tell(trainer: Any, *args: Any) -> None:
        counts.clear()
        recover(trainer, *args)
        about = {
            "generation": trainer.context.generation,
            "rank": trainer.context.rank,
            "iteration": trainer.engine.iteration,
        }
        report({"kind": "communicated", **about, "bytes": dict(counts)})

    TrainingEngine.run_iteration = run_and_tell  # type: ignore[method-assign]
    ElasticTrainer._recover_in_place = recover_and_tell  # type: ignore[method-assign]


def _num_bytes(value: Any) -> int:
    if torch.is_tensor(value):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0

"""Runs pipelines whose messages go through host memory, as with gloo on CUDA, for ``mcore/pipeline/test_staged.py``."""

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from megatron_ft.mcore.model.transformer_config import build_transformer_config
from megatron_ft.mcore.pipeline import communicator
from megatron_ft.planning.pipeline import PipelineShape, receives
from megatron_ft.testing import engines
from tests.helpers.volatile import volatile_state


class Witness:
    """Counts messages, and those sent from or received into the memory of a tensor with a gradient."""

    def __init__(self) -> None:
        self.num_messages = 0
        self.num_direct = 0

    def watch(self, function: Any) -> Any:
        """Return ``function``, with which Megatron begins to send and receive, with counting added."""

        def begin(**about: Any) -> Any:
            tensors = [each for name, each in about.items() if name.startswith("tensor_") and each is not None]
            self.num_messages += len(tensors)
            self.num_direct += sum(each.requires_grad for each in tensors)
            return function(**about)

        return begin


def train(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], is_staged: bool
) -> dict[str, Any]:
    """Run three iterations. Return digests of the state, losses, and the number of messages that were not staged."""
    config, witness = engines.micro_config(overrides, world_size=world_size), Witness()
    with (
        mock.patch.object(communicator, "_sends_host_memory_only", lambda group: is_staged),
        mock.patch.object(p2p_communication, "_batched_p2p_ops", witness.watch(p2p_communication._batched_p2p_ops)),
        mock.patch.object(p2p_communication, "_p2p_ops", witness.watch(p2p_communication._p2p_ops)),
        engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine,
    ):
        assert engine.p2p.is_staged == is_staged
        losses = [engine.run_iteration(number).vote.loss for number in (1, 2, 3)]
        return {
            "state": {**engines.digests(engine), **volatile_state(engine)},
            "losses": losses,
            "num_messages": witness.num_messages,
            "num_direct": witness.num_direct,
        }


def send_and_free(*, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any]) -> int:
    """Send an output whose memory is freed and reused before the receiver requests it.

    Returns:
        Number of values that have arrived as they were sent.
    """
    shape, value = (1 << 10, 1, 1 << 12), 3.0
    config = engines.micro_config(overrides, world_size=world_size)
    with engines.groups_of(config, store=store, rank=rank, world_size=world_size) as groups:
        stage = communicator._StagedCommunicator(groups.pg_collection.pp, build_transformer_config(config, "local"))

        def exchange(sent: torch.Tensor | None) -> Any:
            about = {"tensor_send_prev": None, "recv_next": False, "tensor_shape": shape, "wait_on_reqs": False}
            return stage._communicate(tensor_send_next=sent, recv_prev=sent is None, **about)  # type: ignore[arg-type]

        if rank == 0:
            output = torch.ones(shape, requires_grad=True) * value
            _, _, requests = exchange(output)
            deallocate_output_tensor(output, True)
            others = [torch.zeros(shape) for _ in range(4)]
            store.set("freed", str(len(others)))
        else:
            store.wait(["freed"], timedelta(seconds=60))
            received, _, requests = exchange(None)
        for request in requests.values():
            request.wait()
        return 0 if rank == 0 else int((received == value).sum())


SLOW_SECONDS = 0.25


def measure_waits(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any]
) -> tuple[list[int], int, list[tuple[float, ...]]]:
    """Train on a pipeline whose last stage computes slowly.

    Returns:
        Number of waits of this rank in each iteration, the number of messages that it receives according to the
        schedule, and the measured seconds of all ranks in each iteration.
    """
    config, waits = engines.micro_config(overrides, world_size=world_size), list[int]()
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        if rank == world_size - 1:
            engine.model_chunks[0].register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
        found = []
        for number in (1, 2, 3):
            found.append(engine.run_iteration(number).of_ranks.idle_seconds)
            engine.evaluate()  # waits, too, but is not part of the iteration
            waits.append(engine.boundaries.idle._usual_num_waits)
        shape = PipelineShape(
            num_stages=world_size, num_microbatches=engine.batch.num_microbatches, num_chunks=len(engine.model_chunks)
        )
        num_messages = sum(len(receives(shape, rank, direction)) for direction in ("forward", "backward"))
        return waits, num_messages, found

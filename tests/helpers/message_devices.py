"""Records which tensors pipeline stages on a GPU pass to ``torch.distributed``, for
``tests/unit/mcore/test_fake_gpu.py``."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ft.mcore.pipeline import communicator
from megatron_ft.mcore.pipeline.communicator import ReplayCommunicator, _StagedCommunicator, serve

SHAPE = (4, 1, 8)
GPU = torch.device("cuda", 0)


class Pair:
    """Pipeline group of two ranks, of which this process is the first."""

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return 2

    def rank(self) -> int:
        """Return the rank in the group."""
        return 0

    def __repr__(self) -> str:
        return "pair"


class Done:
    """Request that is complete."""

    def wait(self) -> None:
        """Return at once."""


class Log:
    """Log with one tensor for each iteration, in host memory."""

    def entries(self, iteration: int, direction: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Return entries like ``UpstreamLog.entries``."""
        yield iteration, torch.ones(SHAPE)


def config() -> Any:
    """Return the configuration of a pipeline."""
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32)


def exchanged(*, waits: bool) -> dict[str, list[str]]:
    """Return the devices of the tensors that an exchange with both neighbours passes to gloo, and of those that the
    model receives."""
    given: list[str] = []

    def begin(**tensors: Any) -> dict[str, Done]:
        found = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        given.extend(str(each.device) for each in found.values())
        return {name.removeprefix("tensor_"): Done() for name in found}

    with (
        mock.patch.object(dist, "get_backend", lambda group=None: "gloo"),
        mock.patch.object(p2p_communication, "_p2p_ops", begin),
    ):
        stage = _StagedCommunicator(Pair(), config())  # type: ignore[arg-type]
        previous, following, requests = stage._communicate(
            tensor_send_next=torch.ones(SHAPE, device=GPU, requires_grad=True),
            tensor_send_prev=torch.ones(SHAPE, device=GPU),
            recv_prev=True,
            recv_next=True,
            tensor_shape=SHAPE,
            wait_on_reqs=waits,
        )
        for request in (requests or {}).values():
            request.wait()
    received = [each for each in (previous, following) if each is not None]
    assert all(each.shape == SHAPE and each.requires_grad for each in received)
    return {"given": given, "received": [str(each.device) for each in received]}


def logged(backend: str) -> dict[str, Any]:
    """Return group, tag and device of logged tensors by direction. Sender and receiver must use the same group and
    tag."""
    seen: list[list[Any]] = []

    def send(tensor: torch.Tensor, dst: int, group: Any, tag: int) -> Done:
        seen.append([str(group), tag, tensor.device.type])
        return Done()

    def receive(tensor: torch.Tensor, src: int, group: Any, tag: int) -> None:
        seen.append([str(group), tag, tensor.device.type])

    found = {}
    with (
        mock.patch.object(dist, "get_backend", lambda group=None: backend),
        mock.patch.object(dist, "isend", send),
        mock.patch.object(dist, "recv", receive),
        mock.patch.object(communicator, "_world_group", lambda: "all ranks"),
    ):
        pair: Any = Pair()
        stage = ReplayCommunicator(pair, config(), None, replays_previous=False, replays_next=False)
        for direction in ("forward", "backward"):
            seen.clear()
            requests, num_bytes = serve(Log(), pair, direction, 1, range(5, 7))  # type: ignore[arg-type]
            assert len(requests) == 2 and num_bytes == 2 * 4 * 32
            received = stage._from_log(direction, 1, SHAPE)  # type: ignore[arg-type]
            assert received.device == GPU and received.requires_grad
            assert seen[0] == seen[1] == seen[2], seen
            found[direction] = seen[0]
    return found


def scenario() -> dict[str, Any]:
    """Run the whole scenario with tensors without content."""
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(dist, "get_global_rank", lambda group, rank: rank),
        FakeTensorMode(),
    ):
        return {
            "waited for at once": exchanged(waits=True),
            "waited for later": exchanged(waits=False),
            "logged nccl": logged("nccl"),
            "logged gloo": logged("gloo"),
        }

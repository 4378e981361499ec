"""Messages between stages where the backend cannot send from the device, or knows no tags."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ft.mcore.pipeline import communicator, staged
from megatron_ft.mcore.pipeline.communicator import ReplayCommunicator, serve
from tests.helpers.engines import of_ranks, run_scenarios

PP2 = {"model.num_layers": 4, "parallel.pipeline_model_parallel_size": 2}
PIPELINES = {"pp2": PP2, "vpp2": {**PP2, "parallel.virtual_pipeline_model_parallel_size": 2}}
SHAPE = (4, 1, 8)
GPU = torch.device("cuda", 0)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_what_goes_through_host_memory_arrives_with_the_same_bits() -> None:
    """Both kinds of schedule: one waits for its messages at once, the other later."""
    entry = "tests.helpers.staged_scenarios:train"
    outcomes = run_scenarios(
        {
            f"{name}:{is_staged}": (entry, 2, {"overrides": overrides, "is_staged": is_staged})
            for name, overrides in PIPELINES.items()
            for is_staged in (True, False)
        },
        timeout_seconds=380,
    )
    for name in PIPELINES:
        for through_host, direct in zip(
            of_ranks(outcomes, f"{name}:True"), of_ranks(outcomes, f"{name}:False"), strict=True
        ):
            assert through_host["losses"] == direct["losses"]
            assert through_host["state"] == direct["state"]
            assert through_host["num_messages"] == direct["num_messages"] > 0
            assert (through_host["num_direct"], direct["num_direct"] > 0) == (0, True)


class OneOfTwo:
    """A pipeline group of two ranks that this process is the first of."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


class Done:
    """A request that is done."""

    def wait(self) -> None:
        """At once."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Tensors without content, whose devices are checked by PyTorch."""
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU)
    monkeypatch.setattr(communicator, "world_group", lambda: "all ranks")
    with FakeTensorMode():
        yield monkeypatch


def config(*, batched: bool) -> Any:
    return TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32, batch_p2p_comm=batched
    )


@pytest.mark.parametrize("batched", [True, False])
def test_gloo_gets_tensors_of_the_host_and_the_model_those_of_the_device(
    batched: bool, on_gpu: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, torch.device]] = []

    def begin(**tensors: Any) -> Any:
        found = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        given.extend((name, each.device) for name, each in found.items())
        return [Done() for _ in found] if batched else {name.removeprefix("tensor_"): Done() for name in found}

    on_gpu.setattr(p2p_communication, "_batched_p2p_ops" if batched else "_p2p_ops", begin)
    on_gpu.setattr(dist, "get_backend", lambda group=None: "gloo")
    stage = staged.StagedCommunicator(OneOfTwo(), config(batched=batched))  # type: ignore[arg-type]
    assert stage.is_staged
    previous, following, requests = stage._communicate(
        tensor_send_next=torch.ones(SHAPE, device=GPU, requires_grad=True),
        tensor_send_prev=torch.ones(SHAPE, device=GPU),
        recv_prev=True,
        recv_next=True,
        tensor_shape=SHAPE,
        wait_on_reqs=batched,
    )
    assert len(given) == 4 and {device.type for _, device in given} == {"cpu"}
    for request in (requests or {}).values():
        request.wait()
    for received in (previous, following):
        assert received is not None and received.device == GPU and received.shape == SHAPE and received.requires_grad


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("gloo", "cpu")])
def test_logged_tensors_travel_as_the_backend_wants_them(
    backend: str, device: str, on_gpu: pytest.MonkeyPatch
) -> None:
    """NCCL: from the device, without tags, each direction in a group of its own. gloo: from the host, with tags."""
    sent: list[tuple[Any, int, str]] = []

    def send(tensor: torch.Tensor, dst: int, group: Any, tag: int) -> Done:
        sent.append((group, tag, tensor.device.type))
        return Done()

    def receive(tensor: torch.Tensor, src: int, group: Any, tag: int) -> None:
        sent.append((group, tag, tensor.device.type))

    class Log:
        def entries(self, iteration: int, direction: str) -> Iterator[tuple[int, torch.Tensor]]:
            yield iteration, torch.ones(SHAPE)

    on_gpu.setattr(dist, "get_backend", lambda group=None: backend)
    on_gpu.setattr(dist, "isend", send)
    on_gpu.setattr(dist, "recv", receive)
    pair: Any = OneOfTwo()
    stage = ReplayCommunicator(pair, config(batched=True), None, replays_previous=False, replays_next=False)
    for direction in ("forward", "backward"):
        requests, num_bytes = serve(Log(), pair, direction, 1, range(5, 7))  # type: ignore[arg-type]
        assert len(requests) == 2 and num_bytes == 2 * 4 * 32
        served = sent[:]
        sent.clear()
        received = stage._from_log(direction, 1, SHAPE)  # type: ignore[arg-type]
        assert received.device == GPU and received.requires_grad
        assert served == 2 * sent, "both sides name the same group and tag"
        ((group, tag, of_device),) = sent
        sent.clear()
        assert of_device == device
        if backend == "nccl":
            assert (group, tag) == (pair if direction == "forward" else "all ranks", 0)
        else:
            assert (group, tag) == (pair, communicator.TAGS[direction])  # type: ignore[index]

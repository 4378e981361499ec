"""``P2PCommunicator`` for gloo on CUDA: messages go through host memory.

gloo's collectives accept tensors of a GPU. Its sends and receives do not: they pass the address to a socket.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

Received = tuple[torch.Tensor | None, torch.Tensor | None, Any]
"""(received from the previous rank, received from the next one, requests to wait for)."""


def current_device() -> torch.device:
    """Return the device of this process."""
    device: Any = torch.cuda.current_device()
    return device if isinstance(device, torch.device) else torch.device("cuda", device)


def sends_host_memory_only(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` cannot send tensors of this process's device."""
    return str(dist.get_backend(group)) == "gloo" and current_device().type == "cuda"


@dataclass
class _Transfer:
    """One message: its request, its copy in host memory and, if it is received, its target tensor."""

    request: Any
    host: torch.Tensor
    target: torch.Tensor | None = None
    _is_done: bool = field(default=False, init=False)

    def wait(self) -> None:
        """Wait until the message is sent, or is in the target."""
        if self._is_done:
            return
        self.request.wait()
        if self.target is not None:
            self.target.data.copy_(self.host)
        self._is_done = True


class StagedCommunicator(P2PCommunicator):
    """Megatron's own communicator if the group can send from the device; otherwise it copies messages."""

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig) -> None:
        super().__init__(pp_group, config)
        self.is_staged = sends_host_memory_only(pp_group)

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Received:
        # Exchange as ``P2PCommunicator._communicate`` does; ``tensor_shape`` is the shape of all received tensors.
        if not self.is_staged:
            # Interleaved schedules free an output before its send is done, by setting its ``.data``: the request holds
            # another tensor of the same memory, which stays until then.
            received: Received = super()._communicate(
                tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
            return received
        assert not self.config.variable_seq_lengths, "variable sequence lengths are not supported"
        dtype, device = self.config.pipeline_dtype, current_device()
        hosts: dict[str, torch.Tensor] = {}
        targets: dict[str, torch.Tensor] = {}
        for name, sent in (("send_prev", tensor_send_prev), ("send_next", tensor_send_next)):
            if sent is not None:
                hosts[name] = sent.detach().cpu()  # returns when the computation of the message is done
        for name, is_wanted in (("recv_prev", recv_prev), ("recv_next", recv_next)):
            if is_wanted:
                hosts[name] = torch.empty(tensor_shape, dtype=dtype)
                targets[name] = torch.empty(tensor_shape, dtype=dtype, device=device, requires_grad=True)
        # One by one whatever config.batch_p2p_comm says: gloo does not support batches.
        requests: Mapping[str, Any] = p2p_communication._p2p_ops(
            tensor_send_prev=hosts.get("send_prev"),
            tensor_recv_prev=hosts.get("recv_prev"),
            tensor_send_next=hosts.get("send_next"),
            tensor_recv_next=hosts.get("recv_next"),
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        transfers = {name: _Transfer(request, hosts[name], targets.get(name)) for name, request in requests.items()}
        if wait_on_reqs:
            for transfer in transfers.values():
                transfer.wait()
        return targets.get("recv_prev"), targets.get("recv_next"), None if wait_on_reqs else transfers

"""A ``P2PCommunicator`` that copies messages through host memory, for gloo on CUDA.

Collectives of gloo accept tensors on a GPU. Its sends and receives do not, because they pass the address to a socket.
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
"""(tensor from the previous stage, tensor from the next stage, requests to wait for)."""


def current_device() -> torch.device:
    """Return the device of this process."""
    device: Any = torch.cuda.current_device()
    return device if isinstance(device, torch.device) else torch.device("cuda", device)


def _sends_host_memory_only(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` cannot send tensors of this process's device."""
    return str(dist.get_backend(group)) == "gloo" and current_device().type == "cuda"


@dataclass
class _Transfer:
    """One message that goes through host memory. ``target`` is the device tensor of a received message."""

    request: Any
    host: torch.Tensor
    target: torch.Tensor | None = None
    _is_done: bool = field(default=False, init=False)

    def wait(self) -> None:
        """Wait until the message is sent, or received and copied to ``target``."""
        if self._is_done:
            return
        self.request.wait()
        if self.target is not None:
            self.target.data.copy_(self.host)
        self._is_done = True


class StagedCommunicator(P2PCommunicator):
    """Works like Megatron's communicator if the group can send from the device. Otherwise copies messages through host
    memory."""

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig) -> None:
        super().__init__(pp_group, config)
        self.is_staged = _sends_host_memory_only(pp_group)

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
        # Has the arguments and results of ``P2PCommunicator._communicate``. All received tensors have ``tensor_shape``.
        if not self.is_staged:
            # Interleaved schedules set the ``.data`` of an output before its send has ended. The request references the
            # detached tensor, which keeps the memory allocated until the end of the send.
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
                hosts[name] = sent.detach().cpu()  # waits until the tensor is computed
        for name, is_wanted in (("recv_prev", recv_prev), ("recv_next", recv_next)):
            if is_wanted:
                hosts[name] = torch.empty(tensor_shape, dtype=dtype)
                targets[name] = torch.empty(tensor_shape, dtype=dtype, device=device, requires_grad=True)
        # Never batched, regardless of ``config.batch_p2p_comm``, because gloo does not support batches.
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

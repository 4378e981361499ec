"""A ``P2PCommunicator`` that logs what it sends, and one that reads the logs of other ranks.

Both override the one method that all of Megatron's send and receive methods call, so they support 1F1B and interleaved
schedules.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron_ft.mcore.pipeline.staged import Received, StagedCommunicator, current_device
from megatron_ft.planning.pipeline import Direction
from megatron_ft.runtime.upstream_log.log import UpstreamLog

TAGS: dict[Direction, int] = {"forward": 1_001, "backward": 1_002}
"""Tags of messages with logged tensors; Megatron's own have none."""


def route(group: dist.ProcessGroup, direction: Direction) -> tuple[dist.ProcessGroup, int]:
    """Choose group and tag of logged tensors that are sent in ``direction``.

    NCCL has no tags: messages between two ranks of a group are delivered in the order in which both request them. If a
    pipeline has two stages and several chunks, both directions come from the same rank, so each has its own group.
    """
    if dist.get_backend(group) == "gloo":
        return group, TAGS[direction]
    return (group if direction == "forward" else world_group()), 0


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks of the job."""
    world = dist.group.WORLD
    assert world is not None, "process groups are not initialized"
    return world


class LoggingCommunicator(StagedCommunicator):
    """Keeps a copy of every activation and gradient that it sends.

    Args:
        log: None keeps no copies.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig, log: UpstreamLog | None) -> None:
        super().__init__(pp_group, config)
        self.log = log

    def keep(self, to_next: torch.Tensor | None, to_previous: torch.Tensor | None) -> None:
        """Log a message that is being sent."""
        if self.log is not None and to_next is not None:
            self.log.append("forward", to_next)
        if self.log is not None and to_previous is not None:
            self.log.append("backward", to_previous)

    def _communicate(
        self, *, tensor_send_next: torch.Tensor | None, tensor_send_prev: torch.Tensor | None, **others: Any
    ) -> Received:
        # First: once an output is sent, the schedule may free its memory (``deallocate_pipeline_outputs``).
        self.keep(tensor_send_next, tensor_send_prev)
        received: Received = super()._communicate(
            tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **others
        )
        return received


@dataclass(frozen=True, slots=True)
class _Done:
    """A message that is complete."""

    def wait(self) -> None:
        """Return at once."""


class ReplayCommunicator(LoggingCommunicator):
    """Communicator of a rank whose stage replays: logs replace neighbours that do not replay.

    Messages to and from neighbours that also replay are sent as usual. Messages to the others are logged again and
    dropped; messages from them come from their logs, in the order in which they were sent.

    Args:
        replays_previous: whether the previous stage also replays.
        replays_next: whether the next stage also replays.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        log: UpstreamLog | None,
        *,
        replays_previous: bool,
        replays_next: bool,
    ) -> None:
        super().__init__(pp_group, config, log)
        self._replays_previous, self._replays_next = replays_previous, replays_next
        self.num_bytes = 0
        """Bytes received from logs."""

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
        self.keep(tensor_send_next, tensor_send_prev)
        # Not ``super()``, which would log a second time. Healthy neighbours have received these messages already.
        from_previous, from_next, requests = StagedCommunicator._communicate(
            self,
            tensor_send_next=tensor_send_next if self._replays_next else None,
            tensor_send_prev=tensor_send_prev if self._replays_previous else None,
            recv_prev=recv_prev and self._replays_previous,
            recv_next=recv_next and self._replays_next,
            tensor_shape=tensor_shape,
            wait_on_reqs=wait_on_reqs,
        )
        if recv_prev and not self._replays_previous:
            from_previous = self._from_log("forward", self.prev_rank, tensor_shape)
        if recv_next and not self._replays_next:
            from_next = self._from_log("backward", self.next_rank, tensor_shape)
        # The interleaved schedule waits for each message by name, also for one that did not travel.
        if isinstance(requests, dict):
            wanted = {
                "send_next": tensor_send_next is not None,
                "send_prev": tensor_send_prev is not None,
                "recv_prev": recv_prev,
                "recv_next": recv_next,
            }
            requests = {**{name: _Done() for name, is_wanted in wanted.items() if is_wanted}, **requests}
        return from_previous, from_next, requests

    def _from_log(self, direction: Direction, rank: int | None, shape: Any) -> torch.Tensor:
        dtype = self.config.pipeline_dtype
        tensor = torch.empty(shape, requires_grad=True, device=current_device(), dtype=dtype)
        received = torch.empty(shape, dtype=dtype) if self.is_staged else tensor.data
        # The log is sent in the order of the schedule, and the same schedule asks here: no key has to travel.
        group, tag = route(self.pp_group, direction)
        dist.recv(received, src=rank, group=group, tag=tag)
        if self.is_staged:
            tensor.data.copy_(received)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor


def serve(
    log: UpstreamLog, group: dist.ProcessGroup, direction: Direction, rank: int, iterations: range
) -> tuple[list[Any], int]:
    """Begin to send the logged messages of ``iterations`` in ``direction`` to the neighbour ``rank``, in the same
    order.

    The log is in host memory. NCCL sends from the device, so there the messages have a copy until they are sent.

    Returns:
        Requests to wait for, and the bytes.

    Raises:
        RecoveryError: an iteration is not logged.
    """
    requests, num_bytes = [], 0
    route_group, tag = route(group, direction)
    is_on_host = dist.get_backend(group) == "gloo"
    # All are begun before the first is awaited: this rank has collectives of its own to reach meanwhile.
    for iteration in iterations:
        for _, tensor in log.entries(iteration, direction):
            sent = tensor if is_on_host else tensor.to(current_device(), non_blocking=True)
            requests.append(dist.isend(sent, dst=rank, group=route_group, tag=tag))
            num_bytes += tensor.numel() * tensor.element_size()
    return requests, num_bytes

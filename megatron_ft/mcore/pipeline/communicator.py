"""Subclasses of Megatron's ``P2PCommunicator`` that log sent messages, and that receive logged messages of other ranks.

The classes override only ``_communicate``, which all send and receive methods of Megatron's class call. So they support
both 1F1B and interleaved schedules. ``Boundaries`` keeps the log when process groups are replaced.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.pipeline import Direction
from megatron_ft.runtime.upstream_log.log import UpstreamLog
from megatron_ft.snapshot.capture.idle_gate import IdleGate

# Gloo's collectives accept tensors on a GPU. Gloo's sends and receives do not, because sockets need host memory.

Received = tuple[torch.Tensor | None, torch.Tensor | None, Any]
"""Result of ``_communicate``: (tensor from the previous stage, tensor from the next stage, open requests)."""


class _StagedCommunicator(P2PCommunicator):
    """Communicator that works like Megatron's if the group can send tensors on the device. Otherwise it copies tensors
    through host memory."""

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
        # Arguments and results are those of ``P2PCommunicator._communicate``. Received tensors have ``tensor_shape``.
        if not self.is_staged:
            # Interleaved schedules set the ``.data`` of an output to free it, even before its send has ended. The
            # request references the detached tensor, so the memory stays allocated until the send has ended.
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
        dtype, device = self.config.pipeline_dtype, _current_device()
        hosts: dict[str, torch.Tensor] = {}
        targets: dict[str, torch.Tensor] = {}
        for name, sent in (("send_prev", tensor_send_prev), ("send_next", tensor_send_next)):
            if sent is not None:
                hosts[name] = sent.detach().cpu()  # waits until the tensor is computed
        for name, is_wanted in (("recv_prev", recv_prev), ("recv_next", recv_next)):
            if is_wanted:
                hosts[name] = torch.empty(tensor_shape, dtype=dtype)
                targets[name] = torch.empty(tensor_shape, dtype=dtype, device=device, requires_grad=True)
        # Never batch the messages, whatever ``config.batch_p2p_comm`` is, because gloo does not support batches.
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


class _LoggingCommunicator(_StagedCommunicator):
    """Communicator that logs a copy of every activation and gradient that it sends, and measures waits for messages.

    Args:
        log: log for the copies; None to log nothing.
        idle: object that measures waits for messages; None to measure nothing.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        log: UpstreamLog | None,
        idle: IdleGate | None = None,
    ) -> None:
        super().__init__(pp_group, config)
        self.log = log
        # With NCCL, only a stream waits for a message, so the duration of the call is not the duration of the wait.
        self._idle = None if _is_nccl(pp_group) else idle

    def keep(self, to_next: torch.Tensor | None, to_previous: torch.Tensor | None) -> None:
        """Log the tensors that this rank now sends to the next and the previous stage; None for no tensor."""
        if self.log is not None and to_next is not None:
            self.log.append("forward", to_next)
        if self.log is not None and to_previous is not None:
            self.log.append("backward", to_previous)

    def _communicate(
        self, *, tensor_send_next: torch.Tensor | None, tensor_send_prev: torch.Tensor | None, **others: Any
    ) -> Received:
        # Log before the send, because the schedule may free the tensor after it (``deallocate_pipeline_outputs``).
        self.keep(tensor_send_next, tensor_send_prev)
        waits_now = others.get("wait_on_reqs", True) and (others["recv_prev"] or others["recv_next"])
        with nullcontext() if self._idle is None or not waits_now else self._idle.waiting():
            from_previous, from_next, requests = super()._communicate(
                tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **others
            )
        if self._idle is not None and isinstance(requests, dict):
            gate = self._idle
            requests = {
                name: _Receive(request, gate) if name.startswith("recv") else request
                for name, request in requests.items()
            }
        return from_previous, from_next, requests


class Boundaries:
    """Connection of a rank to adjacent pipeline stages. Its log of messages stays when process groups are replaced."""

    def __init__(self) -> None:
        self.idle = IdleGate()
        """Object that measures how long this rank waits for messages of adjacent stages."""
        self._log: UpstreamLog | None = None
        self._communicator: _LoggingCommunicator | None = None

    @property
    def log(self) -> UpstreamLog | None:
        """Log of the messages that this rank sends; None if messages are not logged."""
        return self._log

    @log.setter
    def log(self, log: UpstreamLog | None) -> None:
        self._log = log
        if self._communicator is not None:
            self._communicator.log = log

    def connect(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig) -> _LoggingCommunicator:
        """Create the communicator for Megatron's schedules."""
        self.idle.forget()
        self._communicator = _LoggingCommunicator(pp_group, config, self._log, self.idle)
        return self._communicator

    def release(self) -> None:
        """Release the communicator, so that its process group can be destroyed. The log stays."""
        self._communicator = None

    @contextmanager
    def logging(self, iteration: int, generation: int) -> Iterator[None]:
        """Log all messages that are sent in this context as messages of ``iteration`` in ``generation``. Measure the
        waits for received messages."""
        log = self._log
        with self.idle.iteration():
            if log is None:
                yield
                return
            log.begin(iteration, generation)
            try:
                yield
                # Not in ``finally``: an iteration that failed has not sent all messages, so its log is abandoned.
                log.end()
            finally:
                log.abandon()

    def commit(self, vote: Vote) -> None:
        if self._log is not None:
            self._log.commit(vote)


def _current_device() -> torch.device:
    """Return the device of this process."""
    device: Any = torch.cuda.current_device()
    return device if isinstance(device, torch.device) else torch.device("cuda", device)


def _sends_host_memory_only(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` can send only host memory although this process's device is a GPU."""
    return not _is_nccl(group) and _current_device().type == "cuda"


def _is_nccl(group: dist.ProcessGroup) -> bool:
    return str(dist.get_backend(group)) == "nccl"


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


@dataclass(frozen=True, slots=True)
class _Receive:
    """Request for a message that is received later. ``idle`` measures the wait for the message."""

    request: Any
    idle: IdleGate

    def wait(self) -> None:
        """Wait until the message is received."""
        with self.idle.waiting():
            self.request.wait()


TAGS: dict[Direction, int] = {"forward": 1_001, "backward": 1_002}
"""Tags of messages with logged tensors. Megatron's own messages have no tags."""


def _route(group: dist.ProcessGroup, direction: Direction) -> tuple[dist.ProcessGroup, int]:
    """Return process group and tag for messages with logged tensors in ``direction``. NCCL does not support tags, and
    matches sends and receives between two ranks of a group by their order. With two pipeline stages and several chunks,
    messages of both directions come from the same rank. So with NCCL each direction has a group of its own."""
    if not _is_nccl(group):
        return group, TAGS[direction]
    return (group if direction == "forward" else _world_group()), 0


def _world_group() -> dist.ProcessGroup:
    """Return the group of all ranks of the job."""
    world = dist.group.WORLD
    assert world is not None, "process groups are not initialized"
    return world


@dataclass(frozen=True, slots=True)
class _Done:
    """Request for a message that is not sent. Waiting for it returns at once."""

    def wait(self) -> None:
        """Return at once."""


class ReplayCommunicator(_LoggingCommunicator):
    """Communicator of a rank whose stage replays.

    Messages between this stage and adjacent stages that also replay are sent as usual. A stage that does not replay
    sends the messages in its log, in their original order. Messages to such a stage are logged again but not sent.

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
        """Number of bytes received from logs of other ranks."""

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
        # Do not use ``super()``, which would log the messages a second time. Send nothing to a stage that does not
        # replay, because this stage received the same messages when the iteration first ran.
        from_previous, from_next, requests = _StagedCommunicator._communicate(
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
        # The interleaved schedule waits for the request of each message, even if the message was not sent.
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
        tensor = torch.empty(shape, requires_grad=True, device=_current_device(), dtype=dtype)
        received = torch.empty(shape, dtype=dtype) if self.is_staged else tensor.data
        # Sender and receiver follow the same schedule, so messages come in the right order and need no key.
        group, tag = _route(self.pp_group, direction)
        dist.recv(received, src=rank, group=group, tag=tag)
        if self.is_staged:
            tensor.data.copy_(received)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor


def serve(
    log: UpstreamLog, group: dist.ProcessGroup, direction: Direction, rank: int, iterations: range
) -> tuple[list[Any], int]:
    """Begin to send to ``rank`` the messages of ``iterations`` and ``direction`` that are in ``log``, in order.

    The log is in host memory. With NCCL, each message is first copied to the device, from which NCCL sends.

    Returns:
        The requests, for which the caller must wait, and the number of bytes that they send.

    Raises:
        RecoveryError: an iteration is not logged.
    """
    requests, num_bytes = [], 0
    route_group, tag = _route(group, direction)
    is_on_host = not _is_nccl(group)
    # This function waits for no request, because this rank must meanwhile take part in other collectives.
    for iteration in iterations:
        for _, tensor in log.entries(iteration, direction):
            sent = tensor if is_on_host else tensor.to(_current_device(), non_blocking=True)
            requests.append(dist.isend(sent, dst=rank, group=route_group, tag=tag))
            num_bytes += tensor.numel() * tensor.element_size()
    return requests, num_bytes

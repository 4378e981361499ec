"""``UpstreamLog``: the tensors that this rank sent to adjacent pipeline stages in the newest iterations, and the votes
of these iterations (MoEvement, section 3.4).

Memory is allocated once. A slot has space for all tensors that one iteration sends. The log is in the memory of the
rank's process and is lost with it. This does no harm, because the stage of the lost rank replays, and computes and logs
these tensors again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch

from megatron_ft.errors import RecoveryError
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.pipeline import Direction, LogKey

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(kw_only=True)
class _Logged:
    """One logged iteration: the slot of its tensors, and how many tensors the slot contains."""

    slot: int
    generation: int
    is_committed: bool = False
    num_sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))


@dataclass(kw_only=True)
class _LogFigures:
    """Number and bytes of the tensors that this rank has logged so far, and the time that this took."""

    num_tensors: int = 0
    num_bytes: int = 0
    blocked_seconds: float = 0.0
    """Seconds that training waited while tensors were copied to the log."""
    cpu_seconds: float = 0.0
    num_unlogged: int = 0
    """Number of iterations that are missing from the log because no slot was free."""


class UpstreamLog:
    """The upstream log of one rank: tensors that the rank sent to other stages. Only one thread may use it.

    Args:
        num_iterations: number of slots; each slot stores one iteration.
        sends: for each direction, the (microbatch, model chunk) of each tensor of an iteration, in sending order.
        shape: shape of every tensor.
        dtype: type of every tensor.
        device: device of the sent tensors. The log is in host memory, which is pinned if this is a CUDA device.
    """

    def __init__(
        self,
        *,
        num_iterations: int,
        sends: Mapping[Direction, Sequence[tuple[int, int]]],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_iterations = num_iterations
        self.figures = _LogFigures()
        self._sends = {direction: tuple(sends[direction]) for direction in DIRECTIONS}
        is_cuda = device.type == "cuda"
        self._memory = {
            # Zeroed now, so that page faults do not slow down the first iterations.
            direction: torch.empty((num_iterations, len(order), *shape), dtype=dtype, pin_memory=is_cuda).zero_()
            for direction, order in self._sends.items()
        }
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._logged: dict[int, _Logged] = {}
        self._votes: dict[int, Vote] = {}
        self._open: _Logged | None = None
        self._is_full = False
        self._gap: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the log allocates."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory.values())

    @property
    def iterations(self) -> tuple[int, ...]:
        """Iterations whose tensors are in the log and whose vote has committed them, in ascending order."""
        return tuple(sorted(number for number, logged in self._logged.items() if logged.is_committed))

    @property
    def votes(self) -> dict[int, Vote]:
        """Votes of committed iterations, for replays. Some of these iterations may have no tensors in this log."""
        return dict(self._votes)

    # -- while training ----------------------------------------------------------------------------------------

    def begin(self, iteration: int, generation: int) -> None:
        """Start logging ``iteration`` of ``generation``. If the iteration ran before, replace its tensors. A committed
        iteration stays committed, because its replay sends bitwise equal tensors. If no slot is free, do not log the
        iteration, and increase ``figures.num_unlogged``."""
        # The slot of an earlier attempt is used again: an iteration must never have tensors of two attempts.
        earlier = self._logged.pop(iteration, None)
        # No older iteration is discarded to make space: a replay needs every iteration since the start of its window.
        if earlier is None and len(self._logged) >= self.num_iterations:
            self._leave_out(iteration)
            return
        self._is_full = False
        slot, committed = (self._free_slot(), False) if earlier is None else (earlier.slot, earlier.is_committed)
        self._open = self._logged[iteration] = _Logged(slot=slot, generation=generation, is_committed=committed)

    def take_gap(self) -> int | None:
        """Return the first iteration of the log's newest gap, which is a sequence of iterations that were not logged.
        Return None if no gap has begun since the last call."""
        gap, self._gap = self._gap, None
        return gap

    def append(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Copy ``tensor``, which this rank is sending in ``direction``, to the log. Do nothing in an evaluation, or if
        no slot was free for the iteration."""
        logged = self._open
        if logged is None:
            return
        began, cpu_began = time.perf_counter(), time.thread_time()
        position = logged.num_sent[direction]
        order = self._sends[direction]
        assert position < len(order), f"{direction}: an iteration must send at most {len(order)} tensors"
        # A copy, not a reference: Megatron frees an output's data after the send (``deallocate_pipeline_outputs``).
        self._copy(self._memory[direction][logged.slot, position], tensor.detach())
        logged.num_sent[direction] = position + 1
        figures = self.figures
        figures.num_tensors += 1
        figures.num_bytes += tensor.numel() * tensor.element_size()
        figures.blocked_seconds += time.perf_counter() - began
        figures.cpu_seconds += time.thread_time() - cpu_began

    def end(self) -> None:
        """Finish logging the iteration after its last tensor; wait until all copies are complete."""
        logged, self._open = self._open, None
        if logged is None:
            return
        # The vote comes next. After the vote, a replay may need this iteration, so all copies must be complete now.
        if self._stream is not None:
            self._stream.synchronize()
        expected = {direction: len(order) for direction, order in self._sends.items()}
        assert logged.num_sent == expected, f"an iteration sent {logged.num_sent} tensors: must send {expected}"

    def abandon(self) -> None:
        """Stop logging the current iteration, because it failed."""
        self._open = None

    def commit(self, vote: Vote) -> None:
        """Mark the iteration of ``vote`` as committed, so that a replay may use its tensors."""
        # The vote is stored even if this rank did not log the iteration: other ranks may have logged it.
        self._votes[vote.iteration] = vote
        if vote.iteration in self._logged:
            self._logged[vote.iteration].is_committed = True

    def trim(self, start_iteration: int) -> None:
        """Discard iterations up to ``start_iteration``. A replay does not need them if its snapshot window starts at
        ``start_iteration`` or later."""
        # A window that starts at an iteration contains the state after it, so its replay begins with the next one.
        self._logged = {number: logged for number, logged in self._logged.items() if number > start_iteration}
        self._votes = {number: vote for number, vote in self._votes.items() if number > start_iteration}

    # -- for a replay ------------------------------------------------------------------------------------------

    def entries(self, iteration: int, direction: Direction) -> Iterator[tuple[LogKey, torch.Tensor]]:
        """Yield the tensors that a committed iteration sent in ``direction``, in sending order, as views of the log.

        Raises:
            RecoveryError: the iteration is not in the log or is not committed.
        """
        # An iteration that is not committed cannot be used: its next attempt may send other bits.
        logged = self._logged.get(iteration)
        if logged is None or not logged.is_committed:
            raise RecoveryError(
                f"iteration {iteration} is not in the upstream log (tensors sent to other stages), which has "
                f"iterations {list(self.iterations)}"
            )
        for position, (microbatch, chunk) in enumerate(self._sends[direction]):
            key = LogKey(
                iteration=iteration,
                microbatch=microbatch,
                chunk=chunk,
                direction=direction,
                generation=logged.generation,
            )
            yield key, self._memory[direction][logged.slot, position]

    def grown(self, other: "UpstreamLog") -> None:
        """Copy the content of ``other``, a log with fewer slots, to this log, which must be empty."""
        for iteration, logged in other._logged.items():
            self.begin(iteration, logged.generation)
            taken = self._logged[iteration]
            for direction in DIRECTIONS:
                self._memory[direction][taken.slot].copy_(other._memory[direction][logged.slot])
            taken.num_sent, taken.is_committed = dict(logged.num_sent), logged.is_committed
        self._open = None
        self._gap = other._gap
        self._votes = other.votes
        self.figures = other.figures

    # -- parts -------------------------------------------------------------------------------------------------

    def _leave_out(self, iteration: int) -> None:
        if not self._is_full:
            self._gap = iteration
        self._is_full, self._open = True, None
        self.figures.num_unlogged += 1

    def _free_slot(self) -> int:
        taken = {logged.slot for logged in self._logged.values()}
        return next(slot for slot in range(self.num_iterations) if slot not in taken)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target``. On CUDA, a separate stream copies while the computation continues."""
        if self._stream is None:
            target.copy_(source)
            return
        # The current stream may still compute the tensor.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # Without this, the allocator could give the memory of the source to another tensor before the copy ends.
        source.record_stream(self._stream)

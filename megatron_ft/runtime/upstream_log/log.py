"""``UpstreamLog``: tensors that this rank sent to adjacent stages in the newest iterations, and the votes of these
iterations (MoEvement, section 3.4).

Memory is allocated once: a slot holds everything that one iteration sends. The log is in the rank's process, because
only living ranks send their log: a stage that has lost a rank replays, and logs again what it sends.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch

from megatron_ft.errors import RecoveryError
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.pipeline import Direction, LogKey

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(kw_only=True)
class _Logged:
    """One iteration in a slot."""

    slot: int
    generation: int
    is_committed: bool = False
    num_sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))


@dataclass(kw_only=True)
class LogFigures:
    """Cost of logging on this rank."""

    num_tensors: int = 0
    num_bytes: int = 0
    blocked_seconds: float = 0.0
    """Seconds that training was blocked."""
    cpu_seconds: float = 0.0
    num_unlogged: int = 0
    """Number of iterations without a free slot."""


class UpstreamLog:
    """Log of one rank, used by one thread.

    Args:
        num_iterations: number of slots.
        sends: per direction, the (microbatch, chunk) of each message of an iteration, in order.
        shape: shape of every tensor.
        device: source device; copies are in host memory, pinned for CUDA.
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
        self.figures = LogFigures()
        self._sends = {direction: tuple(sends[direction]) for direction in DIRECTIONS}
        is_cuda = device.type == "cuda"
        self._memory = {
            # Zeroed to touch all pages: faults in the first iterations would count as blocked training.
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
        """Allocated memory."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory.values())

    @property
    def iterations(self) -> tuple[int, ...]:
        """Logged and committed iterations, ascending."""
        return tuple(sorted(number for number, logged in self._logged.items() if logged.is_committed))

    @property
    def votes(self) -> dict[int, Vote]:
        """Votes of the committed iterations that a replay may run again, logged or not."""
        return dict(self._votes)

    # -- while training ----------------------------------------------------------------------------------------

    def begin(self, iteration: int, generation: int) -> None:
        """Start logging ``iteration``, replacing an earlier attempt at it.

        A committed iteration that a replay runs again stays committed, because it sends the same bits. Without a free
        slot the iteration is counted but not logged.
        """
        # The former attempt's slot is used again: two attempts must never mix in one iteration.
        earlier = self._logged.pop(iteration, None)
        # Older iterations stay: a replay needs all from its window on, so newer ones alone are of no use.
        if earlier is None and len(self._logged) >= self.num_iterations:
            self._leave_out(iteration)
            return
        self._is_full = False
        slot, committed = (self._free_slot(), False) if earlier is None else (earlier.slot, earlier.is_committed)
        self._open = self._logged[iteration] = _Logged(slot=slot, generation=generation, is_committed=committed)

    def take_gap(self) -> int | None:
        """Return the first iteration without a slot since the last free slot, once; None otherwise."""
        gap, self._gap = self._gap, None
        return gap

    def append(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Keep a message that is being sent; outside of an iteration (an evaluation, or no slot) do nothing."""
        logged = self._open
        if logged is None:
            return
        began, cpu_began = time.perf_counter(), time.thread_time()
        position = logged.num_sent[direction]
        order = self._sends[direction]
        assert position < len(order), f"{direction}: an iteration sends more than {len(order)} tensors"
        # A copy, not a reference: Megatron frees an output's data after the send (``deallocate_pipeline_outputs``).
        self._copy(self._memory[direction][logged.slot, position], tensor.detach())
        logged.num_sent[direction] = position + 1
        figures = self.figures
        figures.num_tensors += 1
        figures.num_bytes += tensor.numel() * tensor.element_size()
        figures.blocked_seconds += time.perf_counter() - began
        figures.cpu_seconds += time.thread_time() - cpu_began

    def end(self) -> None:
        """Finish the iteration after its last message."""
        logged, self._open = self._open, None
        if logged is None:
            return
        # The vote follows: once it is settled a replay may need this iteration, so its copies have to be complete.
        if self._stream is not None:
            self._stream.synchronize()
        expected = {direction: len(order) for direction, order in self._sends.items()}
        assert logged.num_sent == expected, f"an iteration sent {logged.num_sent} tensors, not {expected}"

    def abandon(self) -> None:
        """Discard the open iteration, which failed; later messages do not belong to it."""
        self._open = None

    def commit(self, vote: Vote) -> None:
        """Commit the iteration of ``vote``, so that a replay may use its messages."""
        # Also without a slot: a stage that replays needs the votes, and its neighbours may have the tensors.
        self._votes[vote.iteration] = vote
        if vote.iteration in self._logged:
            self._logged[vote.iteration].is_committed = True

    def trim(self, start_iteration: int) -> None:
        """Discard iterations that are not needed for a replay from a window starting at ``start_iteration`` or
        later."""
        # The window has the state after its first iteration, so a replay runs the one after it first.
        self._logged = {number: logged for number, logged in self._logged.items() if number > start_iteration}
        self._votes = {number: vote for number, vote in self._votes.items() if number > start_iteration}

    # -- for a replay ------------------------------------------------------------------------------------------

    def entries(self, iteration: int, direction: Direction) -> Iterator[tuple[LogKey, torch.Tensor]]:
        """Return the messages of a committed iteration in order, as views of the log.

        Raises:
            RecoveryError: it is not logged.
        """
        # Only committed ones: an attempt that failed may have sent other bits than its repetition.
        logged = self._logged.get(iteration)
        if logged is None or not logged.is_committed:
            raise RecoveryError(f"iteration {iteration} is not in the upstream log, which has {self.iterations}")
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
        """Take over the content of ``other``, which has fewer slots."""
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
        """Copy beside the computation on CUDA; the source memory is not reused before the copy ends."""
        if self._stream is None:
            target.copy_(source)
            return
        # The tensor may still be computed on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # Otherwise the allocator could give its memory to a later tensor before the copy has read it.
        source.record_stream(self._stream)

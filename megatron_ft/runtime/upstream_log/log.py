"""``UpstreamLog``: what this rank sent over its pipeline boundaries in the newest iterations, and what the job knew of
each of them (MoEvement, section 3.4).

Memory is taken once: a slot holds all that one iteration sends. It lives in the rank's process, for only ranks that
live serve a replay: a stage that has lost a rank replays, and logs what it sends again.
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
    """What logging has cost this rank."""

    num_tensors: int = 0
    num_bytes: int = 0
    blocked_seconds: float = 0.0
    """Training waited for so long."""
    cpu_seconds: float = 0.0
    num_unlogged: int = 0
    """Iterations for which there was no slot."""


class UpstreamLog:
    """The log of one rank. For one thread.

    Args:
        num_iterations: slots.
        sends: of each direction (microbatch, chunk) of what an iteration sends, in order.
        shape: of every tensor.
        device: where they are sent from; copies lie in the host's memory, beside CUDA in pinned memory.
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
        """Memory that is taken."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory.values())

    @property
    def iterations(self) -> tuple[int, ...]:
        """Those that are logged and committed, rising."""
        return tuple(sorted(number for number, logged in self._logged.items() if logged.is_committed))

    @property
    def votes(self) -> dict[int, Vote]:
        """What the job knew of each committed iteration, logged or not, that a replay may run again."""
        return dict(self._votes)

    # -- while training ----------------------------------------------------------------------------------------

    def begin(self, iteration: int, generation: int) -> None:
        """What is appended until ``end`` is of ``iteration``; it takes the place of an earlier try of it.

        One that is committed and run again, in a replay, stays committed: what it sends is the same to the bit.
        Without a free slot the iteration is not logged, and is counted.
        """
        earlier = self._logged.pop(iteration, None)
        if earlier is None and len(self._logged) >= self.num_iterations:
            self._leave_out(iteration)
            return
        self._is_full = False
        slot, committed = (self._free_slot(), False) if earlier is None else (earlier.slot, earlier.is_committed)
        self._open = self._logged[iteration] = _Logged(slot=slot, generation=generation, is_committed=committed)

    def take_gap(self) -> int | None:
        """The first iteration that found no slot since there was one, to tell of it: once, None at any other time."""
        gap, self._gap = self._gap, None
        return gap

    def append(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Keep what is being sent; nothing where no iteration is open (an evaluation, or no slot)."""
        logged = self._open
        if logged is None:
            return
        began, cpu_began = time.perf_counter(), time.thread_time()
        position = logged.num_sent[direction]
        order = self._sends[direction]
        assert position < len(order), f"{direction}: more than {len(order)} tensors are sent in an iteration"
        self._copy(self._memory[direction][logged.slot, position], tensor.detach())
        logged.num_sent[direction] = position + 1
        figures = self.figures
        figures.num_tensors += 1
        figures.num_bytes += tensor.numel() * tensor.element_size()
        figures.blocked_seconds += time.perf_counter() - began
        figures.cpu_seconds += time.thread_time() - cpu_began

    def end(self) -> None:
        """The iteration has sent all that it sends."""
        logged, self._open = self._open, None
        if logged is None:
            return
        if self._stream is not None:
            self._stream.synchronize()
        expected = {direction: len(order) for direction, order in self._sends.items()}
        assert logged.num_sent == expected, f"an iteration has sent {logged.num_sent}, not {expected}"

    def abandon(self) -> None:
        """The iteration that is open has broken: what is sent until the next one begins is none of its."""
        self._open = None

    def commit(self, vote: Vote) -> None:
        """The iteration of ``vote`` is committed: what it has sent may serve a replay."""
        self._votes[vote.iteration] = vote
        if vote.iteration in self._logged:
            self._logged[vote.iteration].is_committed = True

    def trim(self, start_iteration: int) -> None:
        """Forget what no replay of a window that starts after ``start_iteration`` or later runs again."""
        self._logged = {number: logged for number, logged in self._logged.items() if number > start_iteration}
        self._votes = {number: vote for number, vote in self._votes.items() if number > start_iteration}

    # -- for a replay ------------------------------------------------------------------------------------------

    def entries(self, iteration: int, direction: Direction) -> Iterator[tuple[LogKey, torch.Tensor]]:
        """What a committed iteration has sent, in order: views of the log.

        Raises:
            RecoveryError: it is not logged.
        """
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
        """Take over what ``other``, of fewer slots, holds."""
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
        """Beside the computation on CUDA; its memory is not reused before that."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

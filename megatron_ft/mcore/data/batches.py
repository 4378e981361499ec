"""Makes the microbatches of a rank from samples."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft import failpoints
from megatron_ft.config.job import TrainingConfig
from megatron_ft.planning.iteration import BatchPlan


class Samples(Protocol):
    """Interface of a source of token sequences."""

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of sample ``index``: [seq_length + 1]."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch on one rank.

    ``tokens``, ``labels`` and ``position_ids`` are int64 [micro_batch_size, seq_length], or None on stages other than
    the first and the last. A padding microbatch contains zeros and has no effect on losses and gradients.
    """

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    position_ids: torch.Tensor | None
    is_padding: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Reads the microbatches of one rank. With context parallelism, a rank gets two chunks of every sequence.
    Megatron's layout chooses them so that the work of causal attention is balanced."""

    samples: Samples
    plan: BatchPlan
    seq_length: int
    data_parallel_rank: int
    needs_tokens: bool
    device: torch.device
    context_parallel_rank: int = 0
    context_parallel_size: int = 1

    @classmethod
    def of(
        cls, pg: ProcessGroupCollection, *, samples: Samples, plan: BatchPlan, seq_length: int, device: torch.device
    ) -> "BatchReader":
        """Create the reader of this rank, whose place in the layout follows from the process groups ``pg``."""
        return cls(
            samples=samples,
            plan=plan,
            seq_length=seq_length,
            data_parallel_rank=pg.dp.rank(),
            needs_tokens=pg.pp.rank() in (0, pg.pp.size() - 1),
            device=device,
            context_parallel_rank=pg.cp.rank(),
            context_parallel_size=pg.cp.size(),
        )

    def microbatches(self, iteration: int) -> Iterator[Microbatch]:
        """Yield the rank's microbatches of ``iteration`` (counted from 1), in order. On CUDA, the next microbatch is
        read and copied to the device while the current one is computed."""
        samples = (
            self.plan.first_sample(iteration, self.data_parallel_rank, number)
            for number in range(self.plan.num_microbatches)
        )
        # Inner stages need no tokens, but must know which microbatches are padding.
        if not self.needs_tokens:
            yield from (Microbatch(None, None, None, first is None) for first in samples)
        elif self.device.type == "cuda":
            yield from self._uploaded(samples)
        else:
            yield from (Microbatch(*self._packed(first), first is None) for first in samples)

    def _uploaded(self, samples: Iterator[int | None]) -> Iterator[Microbatch]:
        uploads = (_Upload.begin(self._packed(first), first is None, self.device) for first in samples)
        under_way = next(uploads, None)
        while under_way is not None:
            following = next(uploads, None)
            yield under_way.take()
            under_way = following

    def _packed(self, first_sample: int | None) -> torch.Tensor:
        """Return tokens, labels and positions as one host tensor, int64 [3, micro_batch_size, length]. ``length`` is
        the part of the sequence that this rank has. ``first_sample`` is None for padding."""
        size = self.plan.micro_batch_size
        if first_sample is None:
            rows = torch.zeros((size, self.seq_length + 1), dtype=torch.int64)
        else:
            indices = range(first_sample, first_sample + size)
            rows = torch.from_numpy(np.stack([self.samples.sample(index) for index in indices]))
        positions = torch.arange(self.seq_length).expand(size, -1)
        return torch.stack([self._part(part) for part in (rows[:, :-1], rows[:, 1:], positions)])

    def _part(self, rows: torch.Tensor) -> torch.Tensor:
        if self.context_parallel_size > 1:
            chunks = rows.chunk(2 * self.context_parallel_size, dim=1)
            mine = (self.context_parallel_rank, 2 * self.context_parallel_size - 1 - self.context_parallel_rank)
            rows = torch.cat([chunks[number] for number in mine], dim=1)
        return rows


@dataclass(frozen=True, slots=True)
class _Upload:
    """A microbatch that is being copied to the device, on a separate stream."""

    tensors: torch.Tensor
    is_padding: bool
    is_there: torch.cuda.Event

    @classmethod
    def begin(cls, packed: torch.Tensor, is_padding: bool, device: torch.device) -> "_Upload":
        """Begin the copy from pinned memory, because a copy from other memory would block the host."""
        stream = _upload_stream(device)
        with torch.cuda.stream(stream):
            tensors = packed.pin_memory().to(device, non_blocking=True)
            return cls(tensors, is_padding, stream.record_event())

    def take(self) -> Microbatch:
        """Return the microbatch. The current stream waits for the copy."""
        computing = torch.cuda.current_stream(self.tensors.device)
        computing.wait_event(self.is_there)
        self.tensors.record_stream(computing)  # the tensors were allocated on the other stream
        return Microbatch(*self.tensors, self.is_padding)


@functools.cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return]


def plan_batches(training: TrainingConfig, data_parallel_size: int, num_microbatches_multiple: int) -> BatchPlan:
    """Plan how the samples of an iteration are divided among ``data_parallel_size`` ranks. The number of microbatches
    per rank is a multiple of ``num_microbatches_multiple``."""
    return BatchPlan(
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        data_parallel_size=data_parallel_size,
        num_microbatches_multiple=num_microbatches_multiple,
    )


LossResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sum_of_losses(is_padding: bool, losses: torch.Tensor) -> LossResult:
    """Sum the per-token ``losses`` [micro_batch_size, seq_length] of a microbatch.

    Returns:
        (loss_sum, num_tokens, report): sum of losses, int32 number of tokens, and both as float64 [2]. All are zero for
        a padding microbatch.
    """
    num_tokens = 0 if is_padding else losses.numel()
    # Not multiplied by zero, because zero times a loss that is not finite is NaN.
    counted = torch.where(torch.zeros_like(losses, dtype=torch.bool), losses, 0.0) if is_padding else losses
    loss_sum = counted.float().sum()
    # Filled on the device, because a copy from the host would wait for all queued work.
    tokens = losses.new_full((), num_tokens, dtype=torch.int32)
    return loss_sum, tokens, torch.stack([loss_sum.detach().double(), tokens.double()])


def padding_mask(batch: Microbatch) -> torch.Tensor | None:
    """Return a mask of True values for a padding microbatch, with the shape of its tokens, or [1, 1] if this rank has
    no tokens. Return None for any other microbatch."""
    # Real microbatches get no mask, because the router treats any mask as padding. The embedding checks the shape.
    if not batch.is_padding:
        return None
    if batch.tokens is None:
        return torch.ones((1, 1), dtype=torch.bool)
    return torch.ones_like(batch.tokens, dtype=torch.bool)


def forward_step(
    microbatches: Iterator[Microbatch], model: torch.nn.Module, *, iteration: int
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossResult]]:
    """Run the next microbatch through one model chunk. Return its output and the loss function for this output."""
    failpoints.hit("forward", iteration)
    batch = next(microbatches)
    output = model(batch.tokens, batch.position_ids, None, labels=batch.labels, padding_mask=padding_mask(batch))
    if output.requires_grad:
        output.register_hook(lambda gradient: failpoints.hit("backward", iteration))
    return output, partial(sum_of_losses, batch.is_padding)

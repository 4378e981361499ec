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
from megatron_ft.config.batch_size import BatchSchedule
from megatron_ft.config.job import DataConfig, TrainingConfig
from megatron_ft.planning.iteration import BatchPlan

_COUNTED = 3
"""Index of the loss mask (``DocumentRules.counted``) in the first dimension of a microbatch packed in one tensor."""


class Samples(Protocol):
    """Interface of a source of token sequences."""

    eod: int
    """Token that ends a document."""

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of sample ``index``: [seq_length + 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """Rules for the documents within a sample, as set by ``--eod-mask-loss``, ``--reset-position-ids`` and
    ``--reset-attention-mask`` of Megatron-LM. The token that ends a document belongs to this document."""

    eod: int
    masks_loss: bool
    """Whether the loss leaves out the prediction of the token that follows the end of a document."""
    resets_positions: bool
    resets_attention: bool

    @classmethod
    def of(cls, data: DataConfig, samples: Samples) -> "DocumentRules | None":
        """Return the rules for ``samples``, or None if documents have no effect."""
        if not (data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask):
            return None
        return cls(
            eod=samples.eod,
            masks_loss=data.eod_mask_loss,
            resets_positions=data.reset_position_ids,
            resets_attention=data.reset_attention_mask,
        )

    def counted(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 for each token whose prediction counts in the loss, and 0 for others: int64, shape of ``tokens``."""
        return (tokens != self.eod).long() if self.masks_loss else torch.ones_like(tokens)

    def documents(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the index of each token's document in its row, from 0: int64, shape of ``tokens`` [rows, length]."""
        ends = (tokens == self.eod).long()
        return ends.cumsum(dim=1) - ends

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return token positions in the row, or in the document if ``resets_positions``: int64, shape of ``tokens``."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        if not self.resets_positions:
            return positions
        documents = self.documents(tokens)
        is_first = torch.ones_like(tokens, dtype=torch.bool)
        is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return positions - torch.where(is_first, positions, 0).cummax(dim=1).values


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
    counted: torch.Tensor | None = None
    """1 for tokens that count in the loss, 0 for others: int64, shape of ``tokens``; None if all tokens count."""
    documents: torch.Tensor | None = None
    """Document number of each token, set on all pipeline stages; None if attention does not depend on documents."""

    @classmethod
    def unpack(
        cls, packed: torch.Tensor, is_padding: bool, rules: DocumentRules | None, *, needs_tokens: bool
    ) -> "Microbatch":
        """Make a microbatch from ``packed``, the result of ``BatchReader._packed``."""
        tokens, labels, positions, *others = packed
        counted, documents = others if rules is not None else (None, None)
        return cls(
            *((tokens, labels, positions) if needs_tokens else (None, None, None)),
            is_padding,
            counted if rules is not None and rules.masks_loss and needs_tokens else None,
            documents if rules is not None and rules.resets_attention else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Reads the microbatches of one rank. With context parallelism (CP), a rank reads two chunks of every sequence.
    Megatron's CP layout selects the chunks, so that causal attention is equal work for all CP ranks."""

    samples: Samples
    plan: BatchPlan
    seq_length: int
    data_parallel_rank: int
    needs_tokens: bool
    device: torch.device
    context_parallel_rank: int = 0
    context_parallel_size: int = 1
    rules: DocumentRules | None = None

    @classmethod
    def of(
        cls,
        pg: ProcessGroupCollection,
        *,
        samples: Samples,
        plan: BatchPlan,
        seq_length: int,
        device: torch.device,
        rules: DocumentRules | None,
    ) -> "BatchReader":
        """Create the reader of this rank. The process groups ``pg`` determine the rank's coordinates in the layout."""
        return cls(
            samples=samples,
            plan=plan,
            seq_length=seq_length,
            data_parallel_rank=pg.dp.rank(),
            needs_tokens=pg.pp.rank() in (0, pg.pp.size() - 1),
            device=device,
            context_parallel_rank=pg.cp.rank(),
            context_parallel_size=pg.cp.size(),
            rules=rules,
        )

    def microbatches(self, iteration: int) -> Iterator[Microbatch]:
        """Yield the rank's microbatches of ``iteration`` (counted from 1), in order. On CUDA, the next microbatch is
        read and copied to the device while the current microbatch is computed."""
        samples = self._first_samples(iteration)
        # Inner stages need no tokens. But they must know which microbatches are padding, and where documents end if
        # attention depends on documents.
        if not self.needs_tokens and (self.rules is None or not self.rules.resets_attention):
            yield from (Microbatch(None, None, None, first is None) for first in samples)
        elif self.device.type == "cuda":
            yield from self._uploaded(samples)
        else:
            yield from (self._unpacked(self._packed(first), first is None) for first in samples)

    def num_loss_tokens(self, iteration: int) -> int:
        """Return the number of tokens that count in the loss, in this rank's microbatches of ``iteration``."""
        firsts = [first for first in self._first_samples(iteration) if first is not None]
        if self.rules is None or not self.rules.masks_loss:
            return len(firsts) * self.plan.micro_batch_size * self.seq_length // self.context_parallel_size
        return sum(int(self._packed(first)[_COUNTED].sum()) for first in firsts)

    def _first_samples(self, iteration: int) -> Iterator[int | None]:
        return (
            self.plan.first_sample(iteration, self.data_parallel_rank, number)
            for number in range(self.plan.num_microbatches)
        )

    def _unpacked(self, packed: torch.Tensor, is_padding: bool) -> Microbatch:
        return Microbatch.unpack(packed, is_padding, self.rules, needs_tokens=self.needs_tokens)

    def _uploaded(self, samples: Iterator[int | None]) -> Iterator[Microbatch]:
        uploads = (_Upload.begin(self._packed(first), first is None, self.device) for first in samples)
        under_way = next(uploads, None)
        while under_way is not None:
            following = next(uploads, None)
            yield self._unpacked(under_way.take(), under_way.is_padding)
            under_way = following

    def _packed(self, first_sample: int | None) -> torch.Tensor:
        """Return one microbatch as a host tensor, int64 [3, micro_batch_size, length]: tokens, labels and positions.
        With ``rules``, the first dimension is 5: counted tokens (loss mask) and documents are added. ``length`` is the
        number of tokens of a sequence on this rank. ``first_sample=None`` makes padding."""
        size = self.plan.micro_batch_size
        if first_sample is None:
            rows = torch.zeros((size, self.seq_length + 1), dtype=torch.int64)
        else:
            indices = range(first_sample, first_sample + size)
            rows = torch.from_numpy(np.stack([self.samples.sample(index) for index in indices]))
        tokens, labels, rules = rows[:, :-1], rows[:, 1:], self.rules
        if rules is None:
            parts = [tokens, labels, torch.arange(self.seq_length).expand(size, -1)]
        else:
            parts = [tokens, labels, rules.positions(tokens), rules.counted(tokens), rules.documents(tokens)]
        return torch.stack([self._part(part) for part in parts])

    def _part(self, rows: torch.Tensor) -> torch.Tensor:
        if self.context_parallel_size > 1:
            chunks = rows.chunk(2 * self.context_parallel_size, dim=1)
            mine = (self.context_parallel_rank, 2 * self.context_parallel_size - 1 - self.context_parallel_rank)
            rows = torch.cat([chunks[number] for number in mine], dim=1)
        return rows


@dataclass(frozen=True, slots=True)
class _Upload:
    """A microbatch that is being copied to the device on a separate stream."""

    tensors: torch.Tensor
    is_padding: bool
    is_there: torch.cuda.Event

    @classmethod
    def begin(cls, packed: torch.Tensor, is_padding: bool, device: torch.device) -> "_Upload":
        """Begin the copy, from pinned memory, because a copy from other memory would block the host."""
        stream = _upload_stream(device)
        with torch.cuda.stream(stream):
            tensors = packed.pin_memory().to(device, non_blocking=True)
            return cls(tensors, is_padding, stream.record_event())

    def take(self) -> torch.Tensor:
        """Return the tensor on the device. The current stream waits for the copy."""
        computing = torch.cuda.current_stream(self.tensors.device)
        computing.wait_event(self.is_there)
        self.tensors.record_stream(computing)  # the tensors were allocated on the other stream
        return self.tensors


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
        schedule=BatchSchedule.of(training) if training.rampup_batch_size else None,
        num_microbatches_multiple=num_microbatches_multiple,
    )


LossResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sum_of_losses(is_padding: bool, counted: torch.Tensor | None, losses: torch.Tensor) -> LossResult:
    """Sum the per-token ``losses`` [micro_batch_size, seq_length] of a microbatch.

    Args:
        counted: 1 for tokens that count, 0 for others, in the shape of ``losses``; None if all tokens count.

    Returns:
        (loss_sum, num_tokens, report): sum of the losses that count; int32 number of tokens that count; and these two
            values as float64 [2]. A padding microbatch returns zeros.
    """
    if is_padding:
        counted = torch.zeros_like(losses)
    # Do not multiply by zero: zero times a loss that is not finite is NaN.
    summed = losses if counted is None else torch.where(counted != 0, losses, 0.0)
    loss_sum = summed.float().sum()
    # Compute this on the device, because a copy between host and device would wait for all queued work.
    tokens = losses.new_full((), losses.numel(), dtype=torch.int32) if counted is None else counted.sum().int()
    return loss_sum, tokens, torch.stack([loss_sum.detach().double(), tokens.double()])


def attention_mask(documents: torch.Tensor) -> torch.Tensor:
    """Return a mask that is true where attention is forbidden: bool [rows, 1, length, length]. A token may attend to
    itself and to earlier tokens of its document. ``documents`` [rows, length] are document numbers."""
    length = documents.shape[1]
    later = torch.ones((length, length), dtype=torch.bool, device=documents.device).triu(diagonal=1)
    return (later | (documents[:, :, None] != documents[:, None, :]))[:, None]


def padding_mask(batch: Microbatch) -> torch.Tensor | None:
    """Return a mask of True values for a padding microbatch, in the shape of its tokens, or [1, 1] if this rank has no
    tokens. Return None for a real microbatch."""
    # Real microbatches get no mask, because the router treats any mask as padding. Megatron's first stage requires that
    # the mask has the shape of the tokens.
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
    mask = None if batch.documents is None else attention_mask(batch.documents)
    output = model(batch.tokens, batch.position_ids, mask, labels=batch.labels, padding_mask=padding_mask(batch))
    if output.requires_grad:
        output.register_hook(lambda gradient: failpoints.hit("backward", iteration))
    return output, partial(sum_of_losses, batch.is_padding, batch.counted)

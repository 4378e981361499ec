"""Opens samples, checks that ranks and checkpoint use the same data, and makes the microbatches of a rank."""

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft import failpoints
from megatron_ft.config.batch_size import BatchSchedule
from megatron_ft.config.identity import JobIdentity, settings_of
from megatron_ft.config.job import DataConfig, JobConfig, TrainingConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.control.rundir import RunId
from megatron_ft.corpus.samples import Place, Span, SplitPlan, resolve_vocab_size, vocabulary_entries
from megatron_ft.corpus.tokenizers import build_tokenizer
from megatron_ft.errors import DataError
from megatron_ft.mcore.groups import Collectives
from megatron_ft.planning.iteration import BatchPlan
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.storage.files import write_atomically

_COUNTED = 3
"""Index of the loss mask (``DocumentRules.counted``) in the first dimension of a microbatch packed in one tensor."""


class SampleSource(Protocol):
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
    def of(cls, data: DataConfig, samples: SampleSource) -> "DocumentRules | None":
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

    samples: SampleSource
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
        samples: SampleSource,
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


class Samples:
    """The samples of the split ``train`` or ``valid``. Every index from 0 has a sample, because samples repeat in each
    epoch. A sample depends only on ``data.seed``, sources and index, not on parallel layout or length of the run."""

    def __init__(self, plan: SplitPlan, vocab_size: int, *, eod: int, mmap: bool = True) -> None:
        self.plan = plan
        self.eod = eod
        self.vocab_size = vocab_size
        self._datasets = [IndexedDataset(span.prefix, mmap=mmap) for span in plan.spans]
        for span, dataset in zip(plan.spans, self._datasets, strict=True):
            total = int(dataset.sequence_lengths.sum(dtype=np.int64))
            assert total >= span.first_token + span.num_tokens, (
                f"{span.prefix} has become shorter since its samples were planned"
            )

    def sample(self, index: int) -> np.ndarray:
        """Return the tokens of sample ``index`` (at least 0) as a new int64 array [seq_length + 1].

        Raises:
            DataError: a token is outside the model's vocabulary.
        """
        place = self.locate(index)
        span = self.plan.spans[place.source]
        start = span.first_token + place.sample * self.plan.seq_length
        tokens = self._read(place.source, start, self.plan.seq_length + 1)
        # As unsigned numbers, negative tokens exceed every vocabulary size. So one comparison checks both limits.
        if tokens.view(np.uint64).max() >= self.vocab_size:
            raise self._foreign_token(span, start, tokens)
        return tokens

    def locate(self, index: int) -> Place:
        """Find sample ``index``: return its source, the epoch of this source, and the sample's index in the source."""
        return self.plan.order.locate(index)

    @property
    def num_samples(self) -> int:
        """Number of distinct samples in all sources together."""
        return sum(span.num_samples for span in self.plan.spans)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this split in all sources."""
        return sum(span.num_tokens for span in self.plan.spans)

    def fingerprint(self) -> str:
        """Return the digest by which ranks and jobs find out whether their data differ (``SplitPlan.fingerprint``)."""
        return self.plan.fingerprint()

    def _read(self, source: int, start: int, count: int) -> np.ndarray:
        # Documents are adjacent in the file, so one read may return the end of a document and the start of the next.
        dataset = self._datasets[source]
        dtype = dataset.index.dtype
        tokens: np.ndarray = dataset.bin_reader.read(dtype=dtype, count=count, offset=start * dataset.index.dtype_size)
        return tokens.astype(np.int64)

    def _foreign_token(self, span: Span, start: int, tokens: np.ndarray) -> DataError:
        at = int(np.argmax(tokens.view(np.uint64) >= self.vocab_size))
        constraint = f"tokens must be from 0 to {self.vocab_size - 1}, as in the model's vocabulary"
        return DataError(f"{span.key}={span.name}: token {start + at} has the value {tokens[at]}; {constraint}")


def open_samples(config: JobConfig, split: str) -> Samples:
    """Open the samples of ``split``, which is ``train`` or ``valid``. If necessary, index the built-in corpus first.

    Raises:
        ConfigError, DataError: a source of this split is not valid. ``samples.check_data`` raises the same errors.
    """
    tokenizer = build_tokenizer(config.data)
    plan = SplitPlan.of(config.data, config.model.seq_length, split, tokenizer)
    return Samples(plan, vocabulary_entries(config, tokenizer), eod=tokenizer.eod, mmap=config.data.mmap)


RUN_DATA_NAME = "data_fingerprint.json"


def open_splits(config: JobConfig) -> dict[str, Samples]:
    """Open the samples of the split ``train``, and of ``valid`` if the job evaluates."""
    splits = ["train"] + (["valid"] if config.training.evaluates else [])
    return {split: open_samples(config, split) for split in splits}


def job_identity(config: JobConfig, run_dir: Path, samples: Samples) -> JobIdentity:
    """Return the identity of a job that trains on ``samples`` in ``run_dir``.

    Raises:
        ConfigError: the random id of the run cannot be read from ``run_dir``.
    """
    known = RunId.read(run_dir)
    vocab_size = resolve_vocab_size(config)
    return JobIdentity(
        run_id=known.run_id,
        run_name=run_dir.name,
        settings=settings_of(config, data_fingerprint=samples.fingerprint(), vocab_size=vocab_size),
        allow_change=tuple(config.run.allow_change),
        takes_format_1=known.is_older,
    )


def check_same_data(config: JobConfig, samples: Samples, collectives: Collectives) -> None:
    """Check that all ranks read the same samples. All ranks must call this.

    Raises:
        DataError: a rank reads other samples than rank 0.
    """
    fingerprints = collectives.gather(samples.fingerprint())
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise _other_data(config, rank, 0)


def note_run_data(samples: Samples, run_dir: Path) -> None:
    """Write the fingerprint of the run's data to the run folder, for ranks that join later. One rank calls this.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(run_dir, RUN_DATA_NAME, json.dumps({"train": samples.fingerprint()}).encode())


def check_run_data(config: JobConfig, samples: Samples, run_dir: Path) -> None:
    """Check that this joining rank reads the data whose fingerprint is in the run folder.

    Without this check, the next membership would fail because of this rank. If the run folder has no fingerprint,
    ``check_newcomers_data`` compares the data later.

    Raises:
        DataError: this rank reads other samples, or the file with the fingerprint is damaged.
    """
    path = run_dir / RUN_DATA_NAME
    if not path.exists():
        return
    try:
        known = parse_json(path.read_bytes())["train"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: must contain the fingerprint of the run's data, but is damaged: {error!r}") from None
    if known != samples.fingerprint():
        raise DataError(
            f"data.train={config.data.train}: this joining rank reads other data than the run, whose fingerprint is in "
            f"{path}; give its node the same data"
        )


def check_newcomers_data(config: JobConfig, context: RankContext, fingerprints: Sequence[str], first: int) -> None:
    """Exclude joining ranks that read other samples than rank ``first``, which has state. All ranks must call this.

    If the job can continue without these ranks, their processes exit as if they had been killed. They raise no error,
    because an error would end the job. The other ranks then form the next membership without them.

    Args:
        fingerprints: data fingerprint of every rank of the new membership.

    Raises:
        DataError: a rank reads other samples, and the job cannot continue without this rank.
        RuntimeError: another rank reads other samples and has exited.
    """
    strangers = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[first]]
    if not strangers:
        return
    error = _other_data(config, strangers[0], first)
    if not context.worker.can_survive:
        raise error
    if context.rank in strangers:
        _end_alone(_other_data(config, context.rank, first))
    # Raise the same type of error as a failed collective, after which the ranks form the next membership.
    raise RuntimeError(f"the ranks {strangers} read other training data than rank {first} and are excluded: {error}")


def _end_alone(error: DataError) -> NoReturn:
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    # An exception would be reported and would end the job. So the process exits like a killed rank.
    os._exit(error.exit_code)


def _other_data(config: JobConfig, rank: int, first: int) -> DataError:
    return DataError(
        f"data.train={config.data.train} must be the same data on every rank, but rank {rank} and rank {first} read "
        "different data. The built-in corpus differs between Python versions: write it to an indexed dataset once, and "
        "use this dataset on all nodes"
    )


def check_known_data(config: JobConfig, samples: Samples, known: str | None, directory: Path) -> None:
    """Check that ``samples`` are the data on which the checkpoint in ``directory`` was trained.

    ``known`` is the data fingerprint in the checkpoint. If ``known`` is None, nothing is checked.

    Raises:
        DataError: the data differ, and ``checkpoint.allow_other_data`` is false.
    """
    if known is None or config.checkpoint.allow_other_data:
        return
    if known != samples.fingerprint():
        raise DataError(
            f"data.train={config.data.train} is not the data on which {directory.name} was trained: sources, weights, "
            "seed and sequence length must be the same, or some samples would be repeated and others skipped. To "
            "continue anyway, set checkpoint.allow_other_data=true"
        )

"""Reads the samples of a split with Megatron's ``IndexedDataset``."""

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.check import vocabulary_entries
from megatron_ft.corpus.order import Place
from megatron_ft.corpus.sources import Span, SplitPlan
from megatron_ft.corpus.tokenizers import build_tokenizer
from megatron_ft.errors import DataError


class Samples:
    """The samples of a split. Every index from 0 on has a sample, because the split is repeated epoch after epoch. The
    sample depends only on ``data.seed``, the sources and the index, not on the parallel layout or the length of the
    run."""

    def __init__(self, plan: SplitPlan, vocab_size: int, *, mmap: bool = True) -> None:
        self.plan = plan
        self.vocab_size = vocab_size
        self._datasets = [IndexedDataset(span.prefix, mmap=mmap) for span in plan.spans]
        for span, dataset in zip(plan.spans, self._datasets, strict=True):
            total = int(dataset.sequence_lengths.sum(dtype=np.int64))
            assert total >= span.first_token + span.num_tokens, f"{span.prefix} became shorter since it was planned"

    def sample(self, index: int) -> np.ndarray:
        """Return the tokens of sample ``index`` (at least 0) as a new int64 [seq_length + 1].

        Raises:
            DataError: a token is outside the model's vocabulary.
        """
        place = self.locate(index)
        span = self.plan.spans[place.source]
        start = span.first_token + place.sample * self.plan.seq_length
        tokens = self._read(place.source, start, self.plan.seq_length + 1)
        # As unsigned numbers, negative tokens are larger than every vocabulary. So one comparison checks both limits.
        if tokens.view(np.uint64).max() >= self.vocab_size:
            raise self._foreign_token(span, start, tokens)
        return tokens

    def locate(self, index: int) -> Place:
        """Return the source, the epoch and the number in this source of sample ``index``."""
        return self.plan.order.locate(index)

    @property
    def num_samples(self) -> int:
        """Number of different samples of all sources."""
        return sum(span.num_samples for span in self.plan.spans)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this split in all sources."""
        return sum(span.num_tokens for span in self.plan.spans)

    def fingerprint(self) -> str:
        """Return ``corpus.sources.fingerprint`` of the plan. Two splits with the same fingerprint have the same
        samples."""
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
    """Open the samples of ``split``, ``train`` or ``valid``. Index the built-in corpus first if necessary.

    Raises:
        ConfigError, DataError: a source of this split is not valid; ``corpus.check.check_data`` raises the same errors.
    """
    tokenizer = build_tokenizer(config.data)
    plan = SplitPlan.of(config.data, config.model.seq_length, split, tokenizer)
    return Samples(plan, vocabulary_entries(config, tokenizer), mmap=config.data.mmap)

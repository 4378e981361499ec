"""The samples of a split, read through Megatron's ``IndexedDataset``."""

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.check import vocabulary_entries
from megatron_ft.corpus.order import Place
from megatron_ft.corpus.sources import Span, SplitPlan, fingerprint, plan_split
from megatron_ft.corpus.tokenizers import build_tokenizer
from megatron_ft.errors import DataError


class Samples:
    """Endless samples of a split: every index from 0 has one, epoch after epoch.

    They are a pure function of ``data.seed``, the sources and the index, independent of the layout and the run's
    length.
    """

    def __init__(self, plan: SplitPlan, vocab_size: int, *, mmap: bool = True) -> None:
        self.plan = plan
        self.vocab_size = vocab_size
        self._datasets = [IndexedDataset(span.prefix, mmap=mmap) for span in plan.spans]
        for span, dataset in zip(plan.spans, self._datasets, strict=True):
            total = int(dataset.sequence_lengths.sum(dtype=np.int64))
            assert total >= span.first_token + span.num_tokens, f"{span.prefix} became shorter while it was opened"

    def sample(self, index: int) -> np.ndarray:
        """Return the tokens at ``index`` (at least 0) as a new ``int64[seq_length + 1]``.

        Raises:
            DataError: a token lies outside the model's vocabulary.
        """
        place = self.locate(index)
        span = self.plan.spans[place.source]
        start = span.first_token + place.sample * self.plan.seq_length
        tokens = self._read(place.source, start, self.plan.seq_length + 1)
        # As unsigned numbers negative tokens exceed every vocabulary: one comparison checks both ends.
        if tokens.view(np.uint64).max() >= self.vocab_size:
            raise self._foreign_token(span, start, tokens)
        return tokens

    def locate(self, index: int) -> Place:
        """Return source, epoch and sample of ``index``."""
        return self.plan.order.locate(index)

    @property
    def num_samples(self) -> int:
        """Number of samples of all sources, each counted once."""
        return sum(span.num_samples for span in self.plan.spans)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sources that belong to this split."""
        return sum(span.num_tokens for span in self.plan.spans)

    def fingerprint(self) -> str:
        """Return the fingerprint of the plan (``corpus.sources.fingerprint``), which ranks and resumed runs compare."""
        return fingerprint(self.plan)

    def _read(self, source: int, start: int, count: int) -> np.ndarray:
        # Read ``count`` tokens from ``start`` on; documents are adjacent in the file, so a sample may cross from one to
        # the next.
        dataset = self._datasets[source]
        dtype = dataset.index.dtype
        tokens: np.ndarray = dataset.bin_reader.read(dtype=dtype, count=count, offset=start * dataset.index.dtype_size)
        return tokens.astype(np.int64)

    def _foreign_token(self, span: Span, start: int, tokens: np.ndarray) -> DataError:
        at = int(np.argmax(tokens.view(np.uint64) >= self.vocab_size))
        constraint = f"must be from 0 to {self.vocab_size - 1}, the model's vocabulary"
        return DataError(f"{span.key}={span.name}: token {start + at}={tokens[at]}: {constraint}")


def open_samples(config: JobConfig, split: str) -> Samples:
    """Open the samples of ``train`` or ``valid``; the built-in corpus is indexed first if necessary.

    Raises:
        ConfigError, DataError: as ``check_data`` does, for the sources of this split.
    """
    tokenizer = build_tokenizer(config.data)
    plan = plan_split(config.data, config.model.seq_length, split, tokenizer)
    return Samples(plan, vocabulary_entries(config, tokenizer), mmap=config.data.mmap)

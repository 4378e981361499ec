"""Checks of all files that the job will read, before any rank starts; reads kilobytes, not corpora."""

from dataclasses import dataclass

import numpy as np

from megatron_ft.config.job import JobConfig
from megatron_ft.corpus import sources as src
from megatron_ft.corpus import stdlib
from megatron_ft.corpus.indexed import IndexInfo, bin_path, idx_path
from megatron_ft.corpus.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer, losses
from megatron_ft.errors import ConfigError, DataError

PROBE_WINDOWS = 64
PROBE_WINDOW_TOKENS = 4096
"""Token ids are checked in this many stretches of this length, spread evenly over each ``.bin``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    """Contribution of one source to one split. Counts are None if the built-in corpus is not indexed yet."""

    split: str
    name: str
    tokens: int | None
    samples: int | None
    checked: str
    """Range of the check of its token ids, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """Data that a job reads."""

    sources: tuple[SourceSummary, ...]
    tokenizer_vocab_size: int
    vocab_size: int
    """Entries of the model's vocabulary, padding included."""
    eod: int
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return one line per source, one for the vocabulary, and the warnings."""
        lines = [f"{source.split}: {_counts(source)} in {source.name} ({source.checked})" for source in self.sources]
        lines.append(
            f"vocabulary: {self.tokenizer_vocab_size:,} entries, padded to {self.vocab_size:,}; eod {self.eod}"
        )
        return "\n".join(lines + [f"warning: {warning}" for warning in self.warnings])


def _counts(source: SourceSummary) -> str:
    if source.tokens is None or source.samples is None:
        return "tokens not counted yet"
    return f"{source.tokens:,} tokens, {source.samples:,} samples"


def check_data(config: JobConfig) -> DataSummary:
    """Check every file of the job; with ``dry_run`` nothing is written, else the built-in corpus is indexed here.

    Raises:
        ConfigError: sources, weights, tokenizer or vocabulary that do not fit together.
        DataError: a file that is missing, damaged, empty or too short.
    """
    src.check_lists(config.data)
    tokenizer = build_tokenizer(config.data)
    # Before ranks start: an error on a rank would end the job only after minutes of loading.
    found = _split(config, "train", tokenizer)
    if config.training.eval_interval_iterations:
        found += _split(config, "valid", tokenizer)
    return DataSummary(
        sources=tuple(found),
        tokenizer_vocab_size=tokenizer.vocab_size,
        vocab_size=_padded(config, vocabulary_entries(config, tokenizer)),
        eod=tokenizer.eod,
        warnings=tuple(filter(None, [losses(tokenizer)])),
    )


def resolve_vocab_size(config: JobConfig) -> int:
    """Return the entries of the model's vocabulary: padded to a multiple of ``model.make_vocab_size_divisible_by``."""
    return _padded(config, vocabulary_entries(config, build_tokenizer(config.data)))


def vocabulary_entries(config: JobConfig, tokenizer: Tokenizer) -> int:
    """Return the entries of the vocabulary before padding: ``model.vocab_size`` or the tokenizer's.

    Raises:
        ConfigError: ``model.vocab_size`` is smaller than the tokenizer's.
    """
    wanted = config.model.vocab_size
    if wanted is None:
        return tokenizer.vocab_size
    if wanted < tokenizer.vocab_size:
        constraint = f"must be at least {tokenizer.vocab_size}, the entries of data.tokenizer={config.data.tokenizer}"
        raise ConfigError.of("model.vocab_size", wanted, constraint)
    return wanted


def _padded(config: JobConfig, entries: int) -> int:
    multiple = config.model.make_vocab_size_divisible_by
    if multiple < 1:
        raise ConfigError.of("model.make_vocab_size_divisible_by", multiple, "must be at least 1")
    # Not a multiple of TP: padded rows take part in the softmax, so every layout needs equally many.
    return -(-entries // multiple) * multiple


def _split(config: JobConfig, split: str, tokenizer: Tokenizer) -> list[SourceSummary]:
    key, names, _ = src.configured(config.data, split)
    entries = vocabulary_entries(config, tokenizer)
    totals, notes = [], []
    for position, name in enumerate(names):
        total, note = _source(config, f"{key}[{position}]", name, tokenizer, entries)
        totals.append(total)
        notes.append(note)
    # A corpus that is yet to be indexed must not fail the check for short sources.
    known = [(name, total if total is not None else 1 << 62) for name, total in zip(names, totals, strict=True)]
    found = src.spans(config.data, config.model.seq_length, split, known)
    return [
        SourceSummary(
            split=split,
            name=span.name,
            tokens=None if total is None else span.num_tokens,
            samples=None if total is None else span.num_samples,
            checked=note,
        )
        for span, total, note in zip(found, totals, notes, strict=True)
    ]


def _source(config: JobConfig, key: str, name: str, tokenizer: Tokenizer, entries: int) -> tuple[int | None, str]:
    """Return the tokens of the whole source or None, and a description of the check."""
    if name == stdlib.NAME and config.dry_run:
        prefix = stdlib.corpus_prefix(config.data.cache_dir, tokenizer)
        if not idx_path(prefix).exists():
            return _expected_tokens(tokenizer), f"will be indexed in {config.data.cache_dir}"
    prefix = src.source_prefix(config.data, name, tokenizer)
    info = src.read_info(key, prefix)
    note = _check_ids(key, info, entries)
    return info.num_tokens, f"indexed in {config.data.cache_dir}; {note}" if name == stdlib.NAME else note


def _expected_tokens(tokenizer: Tokenizer) -> int | None:
    files = stdlib.list_files(stdlib.library_folder())
    return sum(file.size_bytes + 1 for file in files) if isinstance(tokenizer, ByteTokenizer) else None


def _check_ids(key: str, info: IndexInfo, entries: int) -> str:
    """Compare token ids with the vocabulary; return the range of the check. Raises DataError at the first invalid
    id."""
    bounds = np.iinfo(info.dtype)
    # Every value of the format is in the vocabulary: there is nothing to read.
    if bounds.min >= 0 and bounds.max < entries:
        return f"all ids fit: {info.dtype.name}"
    tokens = np.memmap(bin_path(info.prefix), dtype=info.dtype, mode="r")
    # Samples only, for a corpus may have terabytes; ids are checked again when each sample is read.
    starts = np.linspace(0, max(0, info.num_tokens - PROBE_WINDOW_TOKENS), PROBE_WINDOWS, dtype=np.int64)
    for start in np.unique(starts).tolist():
        window = tokens[start : start + PROBE_WINDOW_TOKENS].astype(np.int64)
        outside = (window < 0) | (window >= entries)
        if outside.any():
            at = int(np.argmax(outside))
            constraint = f"must be from 0 to {entries - 1}, the vocabulary (data.tokenizer, model.vocab_size)"
            raise DataError(f"{key}={info.prefix}: token {start + at}={window[at]}: {constraint}")
    return f"ids of {min(info.num_tokens, starts.size * PROBE_WINDOW_TOKENS):,} tokens checked"

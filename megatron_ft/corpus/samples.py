"""The samples that a job trains on: their order, their place in the data files, and the check of these files.

The documents of a source are concatenated. A sample is ``seq_length + 1`` consecutive tokens; sample k of a split
starts ``k * seq_length`` tokens after the first token of the split. No sample contains tokens of two splits. The check
reads only small parts of large files.

The order of samples is a pure function of (seed, index), computed in constant memory. It does not depend on the length
of a run or on its parallel layout. In each epoch, a bijection with its own key permutes the samples of a source. This
bijection is a Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002). Its domain is the smallest square number that is not below the number of samples. The order is divided into
blocks of equal length. The weights of the sources determine how many samples of a block come from each source. Another
bijection shuffles the block.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import ceil, isqrt, lcm
from pathlib import Path

import numpy as np

from megatron_ft.config.findings import Findings
from megatron_ft.config.identity import DOCUMENT_KEYS
from megatron_ft.config.job import DataConfig, JobConfig
from megatron_ft.corpus import stdlib
from megatron_ft.corpus.indexed import IndexInfo, bin_path, check_tokenizer, idx_path, read_dtype
from megatron_ft.corpus.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer, losses
from megatron_ft.errors import ConfigError, DataError

NUM_ROUNDS = 8
MIN_BLOCK_SAMPLES = 1024
_MASK = (1 << 64) - 1


@lru_cache(maxsize=256)
def _round_keys(key: str) -> tuple[int, ...]:
    return struct.unpack(f"<{NUM_ROUNDS}Q", hashlib.blake2b(key.encode(), digest_size=8 * NUM_ROUNDS).digest())


def _permute(position: int, size: int, key: str) -> int:
    """Permute ``range(size)`` pseudo-randomly with seed ``key``. Return the number to which ``position`` is mapped."""
    assert 0 <= position < size, f"position {position} lies outside range({size})"
    # At most about 2 * sqrt(size) positions of the square are outside the range, so few positions need another pass.
    side = isqrt(size - 1) + 1 if size > 1 else 1
    keys = _round_keys(key)
    while True:
        left, right = divmod(position, side)
        for round_key in keys:
            # Addition modulo the side replaces the usual XOR, because the side is rarely a power of two.
            left, right = right, (left + _mix(right ^ round_key)) % side
        position = left * side + right
        if position < size:
            return position


def _mix(value: int) -> int:
    """Mix the bits of a 64-bit integer with the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Place:
    """Place of a sample in the data: source, epoch of the source, and index of the sample in the source."""

    source: int
    epoch: int
    sample: int


@dataclass(frozen=True, kw_only=True)
class _SampleOrder:
    """Order of all samples of a split (training or validation).

    In each epoch of a source, each of its samples is used exactly once. After every block of ``block_samples`` indices,
    the number of samples used from a source differs by less than one from the number that its weight demands.
    """

    seed: int
    split: str
    num_samples: tuple[int, ...]
    """Number of samples of each source, at least 1."""
    weights: tuple[float | int, ...] | None = None
    """Relative weight of each source. With None, the weight of a source is its number of samples."""

    def __post_init__(self) -> None:
        assert self.num_samples and min(self.num_samples) > 0, f"num_samples={self.num_samples}: each must be above 0"
        has_weights = self.weights is None or len(self.weights) == len(self.num_samples)
        assert has_weights, f"weights={self.weights}: must contain one weight for each source"

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return tuple(accumulate(_integer_weights(self.weights or self.num_samples)))

    @cached_property
    def block_samples(self) -> int:
        """Number of samples in each block of the order, large enough that a block has samples of every source."""
        smallest = min(_integer_weights(self.weights or self.num_samples))
        return max(MIN_BLOCK_SAMPLES, ceil(Fraction(self._bounds[-1], smallest)))

    def locate(self, index: int) -> Place:
        """Return source, epoch and index in the source of the sample with number ``index`` (from 0) in the order."""
        if index < 0:
            raise ValueError(f"sample index {index}: must not be negative")
        source, rank = (0, index) if len(self.num_samples) == 1 else self._deal(index)
        epoch, position = divmod(rank, self.num_samples[source])
        key = f"{self.split}/{self.seed}/source {source}/epoch {epoch}"
        return Place(source, epoch, _permute(position, self.num_samples[source], key))

    def _deal(self, index: int) -> tuple[int, int]:
        """Return the source of the sample at ``index``, and the sample's number among all samples drawn from that
        source. The number starts at 0 and continues from epoch to epoch."""
        # Blocks begin at fixed indices, so that a sample depends neither on the length of the run nor on other samples.
        block, offset = divmod(index, self.block_samples)
        position = _permute(offset, self.block_samples, f"{self.split}/{self.seed}/block {block}")
        before, total = block * self.block_samples, self._bounds[-1]
        after = before + self.block_samples
        start_before = start_after = 0
        for source, bound in enumerate(self._bounds):
            # Exact cumulative shares are rounded down, so rounding errors do not add up over blocks.
            end_before, end_after = bound * before // total, bound * after // total
            if position < end_after - end_before:
                return source, (end_before - start_before) + position - (start_after - start_before)
            start_before, start_after = end_before, end_after
        raise AssertionError(f"index {index} has no source")


def _integer_weights(weights: Sequence[float | int]) -> list[int]:
    fractions = [Fraction(weight) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]


def _check_weights(key: str, weights: Sequence[float] | None, num_sources: int) -> None:
    """Raise a ConfigError unless ``weights`` is None or has one positive finite weight for each source."""
    if weights is None:
        return
    if len(weights) != num_sources:
        raise ConfigError.of(key, list(weights), f"must have as many weights as there are sources, {num_sources}")
    for position, weight in enumerate(weights):
        if not 0 < weight < float("inf"):
            raise ConfigError.of(f"{key}[{position}]", weight, "must be positive and finite")
    if max(weights) > 1e9 * min(weights):
        raise ConfigError.of(key, list(weights), "must not differ by more than a factor of 1e9")


SPLITS = ("train", "valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of one source (a data file) that belongs to one split (training or validation)."""

    key: str
    """Configuration key of the source, which messages show, e.g. ``data.train[0]``."""
    name: str
    """Path of the source in the configuration, or the name of the built-in corpus."""
    prefix: str
    first_token: int
    num_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """Samples of a split (training or validation): the parts of sources that contain them, and their order."""

    seq_length: int
    spans: tuple[Span, ...]
    order: _SampleOrder
    document_rules: tuple[str, ...] = ()
    """Keys in ``DOCUMENT_KEYS`` (document boundaries) that are true, then ``eod=<id>``. Empty if no key is true."""

    def fingerprint(self) -> str:
        """Return a hexadecimal digest of the split: its order of samples, the sizes of its sources, their first and
        last tokens, and ``document_rules``.

        Tokens in the middle of a source are not read, so the digest does not change if only these tokens change.
        """
        digest = hashlib.blake2b(repr((self.seq_length, self.order)).encode(), digest_size=8)
        if self.document_rules:
            digest.update(repr(self.document_rules).encode())
        for span in self.spans:
            # Read only the ends, because every rank computes this at every start, whatever the size of the sources.
            edge = min(4096, span.num_tokens)
            digest.update(f"{span.first_token} {span.num_tokens}".encode())
            for start in (span.first_token, span.first_token + span.num_tokens - edge):
                digest.update(_read_tokens(span.prefix, start, edge).tobytes())
        return digest.hexdigest()

    @classmethod
    def of(cls, config: DataConfig, seq_length: int, split: str, tokenizer: Tokenizer) -> "SplitPlan":
        """Plan the samples of ``split`` and their order. The built-in corpus is indexed if necessary.

        Raises:
            ConfigError: sources and weights do not fit together.
            DataError: a file is missing, damaged or too short.
        """
        _check_lists(config)
        key, sources, _ = _configured(config, split)
        prefixes = [_source_prefix(config, source, tokenizer) for source in sources]
        infos = [_read_info(f"{key}[{position}]", prefix) for position, prefix in enumerate(prefixes)]
        found = spans(config, seq_length, split, [(info.prefix, info.num_tokens) for info in infos])
        rules = tuple(name for name in DOCUMENT_KEYS if getattr(config, name))
        return cls(
            seq_length=seq_length,
            spans=found,
            order=_sample_order(config, split, found),
            document_rules=(*rules, f"eod={tokenizer.eod}") if rules else (),
        )


def num_samples(num_tokens: int, seq_length: int) -> int:
    """Return the number of samples in ``num_tokens`` tokens. Adjacent samples share one token: the last label of a
    sample is the first input of the next sample."""
    return max(0, (num_tokens - 1) // seq_length)


def _source_prefix(config: DataConfig, source: str, tokenizer: Tokenizer) -> Path:
    """Return the common path of a dataset's files, without suffix. The built-in corpus is indexed if necessary."""
    return stdlib.ensure_corpus(config.cache_dir, tokenizer) if source == stdlib.NAME else Path(source)


def _read_info(key: str, prefix: Path) -> IndexInfo:
    """Return the result of ``IndexInfo.read(prefix)``. Add the configuration key to its errors."""
    try:
        return IndexInfo.read(prefix)
    except DataError as error:
        raise DataError(f"{key}={prefix}: {error}") from error


def _configured(config: DataConfig, split: str) -> tuple[str, list[str], Sequence[float] | None]:
    """Return configuration key, sources and weights of ``split``. ``valid`` without sources uses those of ``train``."""
    assert split in SPLITS, f"split {split!r} is not one of {SPLITS}"
    if split == "valid" and config.valid:
        return "data.valid", config.valid, config.valid_weights
    return "data.train", config.train, config.train_weights


def spans(config: DataConfig, seq_length: int, split: str, tokens: Sequence[tuple[str, int]]) -> tuple[Span, ...]:
    """Compute the part of each source that belongs to ``split``. ``tokens`` has prefix and token count of each source.

    Raises:
        DataError: the part of a source has not enough tokens for one sample.
    """
    key, sources, _ = _configured(config, split)
    result = []
    for position, (name, (prefix, total)) in enumerate(zip(sources, tokens, strict=True)):
        first, count = _part(config, split, total)
        samples = num_samples(count, seq_length)
        source_key = f"{key}[{position}]"
        if not samples:
            raise DataError.of(source_key, name, _too_short(config, split, total, count, seq_length))
        result.append(
            Span(key=source_key, name=name, prefix=prefix, first_token=first, num_tokens=count, num_samples=samples)
        )
    return tuple(result)


def _part(config: DataConfig, split: str, total: int) -> tuple[int, int]:
    """Return which of a source's ``total`` tokens belong to ``split``: index of the first one, and their count."""
    if config.valid:
        return 0, total
    if not 0 <= config.valid_fraction < 1:
        raise ConfigError.of("data.valid_fraction", config.valid_fraction, "must be at least 0 and below 1")
    # Tokens are held out even if the job never evaluates, so that switching evaluation on changes no training sample.
    held_out = int(total * config.valid_fraction)
    return (0, total - held_out) if split == "train" else (total - held_out, held_out)


def _too_short(config: DataConfig, split: str, total: int, count: int, seq_length: int) -> str:
    what = f"{count} of its {total} tokens are for {split}: must be at least model.seq_length + 1 = {seq_length + 1}"
    if config.valid:
        return what
    return f"{what} (data.valid_fraction={config.valid_fraction})"


def _check_lists(config: DataConfig) -> None:
    """Raise a ConfigError if sources and weights do not fit together, or if a source occurs twice."""
    if not config.train:
        raise ConfigError.of("data.train", config.train, "must name at least one source")
    _check_weights("data.train_weights", config.train_weights, len(config.train))
    if config.valid_weights is not None and not config.valid:
        raise ConfigError.of("data.valid_weights", config.valid_weights, "must be null without data.valid")
    _check_weights("data.valid_weights", config.valid_weights, len(config.valid))
    for key, sources in (("data.train", config.train), ("data.valid", config.valid)):
        # Compare resolved paths, because two paths to one file would read its tokens twice as often as intended.
        resolved = [source if source == stdlib.NAME else str(Path(source).resolve()) for source in sources]
        for position, source in enumerate(resolved):
            if source in resolved[:position]:
                raise ConfigError.of(f"{key}[{position}]", sources[position], "must not be named twice")
    shared = {str(Path(source).resolve()) for source in config.train} & {str(Path(s).resolve()) for s in config.valid}
    if shared:
        raise ConfigError.of(
            "data.valid", config.valid, f"must not contain {sorted(shared)[0]}, which is in data.train"
        )


def _read_tokens(prefix: str, start: int, count: int) -> np.ndarray:
    dtype = read_dtype(prefix)
    tokens = np.fromfile(bin_path(prefix), dtype=dtype, count=count, offset=start * dtype.itemsize)
    return tokens.astype(np.int64)


def _sample_order(config: DataConfig, split: str, found: Sequence[Span]) -> _SampleOrder:
    """Return the order of the samples of ``split``. It depends on ``data.seed`` and the weights of the sources."""
    weights = _configured(config, split)[2]
    return _SampleOrder(
        seed=config.seed,
        split=split,
        num_samples=tuple(span.num_samples for span in found),
        weights=None if weights is None else tuple(weights),
    )


PROBE_WINDOWS = 64
PROBE_WINDOW_TOKENS = 4096
"""Number of tokens in each of the ``PROBE_WINDOWS`` ranges of a ``.bin`` file in which token ids are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceSummary:
    """Numbers of tokens and samples of a source in a split; both None for a built-in corpus that is not indexed yet."""

    split: str
    name: str
    tokens: int | None
    samples: int | None
    checked: str
    """Text that says which token ids of the source were checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """Summary of the data that a job will read."""

    sources: tuple[_SourceSummary, ...]
    tokenizer_vocab_size: int
    vocab_size: int
    """Number of entries of the model's vocabulary, including padding."""
    eod: int
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """Describe the data: a line for each source, a line for the vocabulary, and warnings."""
        lines = [f"{source.split}: {_counts(source)} in {source.name} ({source.checked})" for source in self.sources]
        lines.append(
            f"vocabulary: {self.tokenizer_vocab_size:,} entries, padded to {self.vocab_size:,}; eod {self.eod}"
        )
        return "\n".join(lines + [f"warning: {warning}" for warning in self.warnings])


def _counts(source: _SourceSummary) -> str:
    if source.tokens is None or source.samples is None:
        return "tokens not counted yet"
    return f"{source.tokens:,} tokens, {source.samples:,} samples"


def check_data(config: JobConfig) -> DataSummary:
    """Check every data file of the job. The built-in corpus is indexed if necessary, except with ``dry_run``.

    Raises:
        ConfigError: sources, weights, tokenizer and vocabulary do not fit together.
        DataError: a file is missing, damaged, empty or too short.
        SeveralErrors: there are several errors, for example one in each of two sources.
    """
    found = Findings()
    with found.collecting(at_fault=()):
        _check_lists(config.data)
    tokenizer = None
    with found.collecting(at_fault=()):
        tokenizer = build_tokenizer(config.data)
        vocabulary_entries(config, tokenizer)
    # Check this before ranks start, because an error on a rank would end the job only after minutes of loading.
    splits = ("train", "valid") if config.training.evaluates else ("train",)
    if found:
        for split in splits:
            _check_files(config.data, split, found)
    found.raise_errors()
    assert tokenizer is not None, "a job without errors has a tokenizer"
    sources = [source for split in splits for source in _split(config, split, tokenizer, found)]
    found.raise_errors()
    return DataSummary(
        sources=tuple(sources),
        tokenizer_vocab_size=tokenizer.vocab_size,
        vocab_size=_padded(config, vocabulary_entries(config, tokenizer)),
        eod=tokenizer.eod,
        warnings=tuple(filter(None, [losses(tokenizer)])),
    )


def resolve_vocab_size(config: JobConfig) -> int:
    """Return the padded size of the model's vocabulary, a multiple of ``model.make_vocab_size_divisible_by``."""
    return _padded(config, vocabulary_entries(config, build_tokenizer(config.data)))


def vocabulary_entries(config: JobConfig, tokenizer: Tokenizer) -> int:
    """Return the size of the vocabulary before padding: ``model.vocab_size``, or the tokenizer's size if it is null.

    Raises:
        ConfigError: ``model.vocab_size`` is smaller than the tokenizer's vocabulary.
    """
    wanted = config.model.vocab_size
    if wanted is None:
        return tokenizer.vocab_size
    if wanted < tokenizer.vocab_size:
        constraint = f"must be at least {tokenizer.vocab_size}, the size of data.tokenizer={config.data.tokenizer}"
        raise ConfigError.of("model.vocab_size", wanted, constraint)
    return wanted


def _padded(config: JobConfig, entries: int) -> int:
    multiple = config.model.make_vocab_size_divisible_by
    if multiple < 1:
        raise ConfigError.of("model.make_vocab_size_divisible_by", multiple, "must be at least 1")
    # Padded rows take part in the softmax. So do not pad to a multiple of TP: the loss would depend on TP.
    return -(-entries // multiple) * multiple


def _check_files(config: DataConfig, split: str, found: Findings) -> None:
    """Check the index files of a split's sources without a tokenizer. Add errors to ``found``."""
    key, names, _ = _configured(config, split)
    for position, name in enumerate(names):
        if name != stdlib.NAME:
            with found.collecting(at_fault=()):
                _read_info(f"{key}[{position}]", Path(name))


def _split(config: JobConfig, split: str, tokenizer: Tokenizer, found: Findings) -> list[_SourceSummary]:
    """Check and summarize the sources of a split. If there are errors, add them to ``found`` and return no summary."""
    key, names, _ = _configured(config.data, split)
    entries = vocabulary_entries(config, tokenizer)
    totals, notes = [], []
    for position, name in enumerate(names):
        with found.collecting(at_fault=()):
            total, note = _source(config, f"{key}[{position}]", name, tokenizer, entries)
            totals.append(total)
            notes.append(note)
    if found:
        return []
    # A corpus that is yet to be indexed must not fail the check for short sources.
    known = [(name, total if total is not None else 1 << 62) for name, total in zip(names, totals, strict=True)]
    found_spans: tuple[Span, ...] = ()
    with found.collecting(at_fault=()):
        found_spans = spans(config.data, config.model.seq_length, split, known)
    if found:
        return []
    return [
        _SourceSummary(
            split=split,
            name=span.name,
            tokens=None if total is None else span.num_tokens,
            samples=None if total is None else span.num_samples,
            checked=note,
        )
        for span, total, note in zip(found_spans, totals, notes, strict=True)
    ]


def _source(config: JobConfig, key: str, name: str, tokenizer: Tokenizer, entries: int) -> tuple[int | None, str]:
    """Check a source. Return its number of tokens (None if unknown), and a text about what was checked."""
    if name == stdlib.NAME and config.dry_run:
        prefix = stdlib.corpus_prefix(config.data.cache_dir, tokenizer)
        if not idx_path(prefix).exists():
            return _expected_tokens(tokenizer), f"will be indexed in {config.data.cache_dir}"
    prefix = _source_prefix(config.data, name, tokenizer)
    info = _read_info(key, prefix)
    try:
        check_tokenizer(prefix, tokenizer.fingerprint)
    except DataError as error:
        raise DataError(f"{key}={error}") from None
    note = _check_ids(key, info, entries)
    return info.num_tokens, f"indexed in {config.data.cache_dir}; {note}" if name == stdlib.NAME else note


def _expected_tokens(tokenizer: Tokenizer) -> int | None:
    files = stdlib.list_files(stdlib.library_folder())
    return sum(file.size_bytes + 1 for file in files) if isinstance(tokenizer, ByteTokenizer) else None


def _check_ids(key: str, info: IndexInfo, entries: int) -> str:
    """Check token ids of a source. Return a text about which ids were checked. Raise a DataError for an invalid id."""
    bounds = np.iinfo(info.dtype)
    # If every value of the format is in the vocabulary, no token has to be read.
    if bounds.min >= 0 and bounds.max < entries:
        return f"every {info.dtype.name} value is a valid token id"
    tokens = np.memmap(bin_path(info.prefix), dtype=info.dtype, mode="r")
    # Check only a sample of the ids, because a corpus may have terabytes. Each id is checked again when it is read.
    starts = np.linspace(0, max(0, info.num_tokens - PROBE_WINDOW_TOKENS), PROBE_WINDOWS, dtype=np.int64)
    for start in np.unique(starts).tolist():
        window = tokens[start : start + PROBE_WINDOW_TOKENS].astype(np.int64)
        outside = (window < 0) | (window >= entries)
        if outside.any():
            at = int(np.argmax(outside))
            constraint = f"must be from 0 to {entries - 1}, the vocabulary's ids (data.tokenizer, model.vocab_size)"
            raise DataError(f"{key}={info.prefix}: id of token {start + at} is {window[at]}: {constraint}")
    return f"ids of {min(info.num_tokens, starts.size * PROBE_WINDOW_TOKENS):,} tokens checked"

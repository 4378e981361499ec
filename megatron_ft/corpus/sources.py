"""Sources of a job: their training and validation tokens, and the number of samples.

The documents of a source are concatenated. A sample is ``seq_length + 1`` consecutive tokens; sample k of a split
starts ``k * seq_length`` tokens after the first token of the split. A sample never contains tokens of the other split.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ft.config.data import DataConfig
from megatron_ft.corpus import stdlib
from megatron_ft.corpus.indexed import IndexInfo, bin_path, read_dtype
from megatron_ft.corpus.order import SampleOrder, check_weights
from megatron_ft.corpus.tokenizers import Tokenizer
from megatron_ft.errors import ConfigError, DataError

SPLITS = ("train", "valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens of one source that belong to one split."""

    key: str
    """Configuration key of the source, for messages."""
    name: str
    """The source as configured."""
    prefix: str
    first_token: int
    num_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The spans of a split and the order of their samples."""

    seq_length: int
    spans: tuple[Span, ...]
    order: SampleOrder


def num_samples(num_tokens: int, seq_length: int) -> int:
    """Count the samples in ``num_tokens`` tokens. Neighbours share one token: the last label of one is the first input
    of the next."""
    return max(0, (num_tokens - 1) // seq_length)


def source_prefix(config: DataConfig, source: str, tokenizer: Tokenizer) -> Path:
    """Return the file prefix of ``source``; indexes the built-in corpus if it is not indexed yet."""
    return stdlib.ensure_corpus(config.cache_dir, tokenizer) if source == stdlib.NAME else Path(source)


def read_info(key: str, prefix: Path) -> IndexInfo:
    """Call ``IndexInfo.read``, with the configuration key in its errors."""
    try:
        return IndexInfo.read(prefix)
    except DataError as error:
        raise DataError(f"{key}={prefix}: {error}") from error


def configured(config: DataConfig, split: str) -> tuple[str, list[str], Sequence[float] | None]:
    """Return (key, sources, weights) of ``split``; validation uses the training sources if it has none of its own."""
    assert split in SPLITS, f"split {split!r} is not one of {SPLITS}"
    if split == "valid" and config.valid:
        return "data.valid", config.valid, config.valid_weights
    return "data.train", config.train, config.train_weights


def spans(config: DataConfig, seq_length: int, split: str, tokens: Sequence[tuple[str, int]]) -> tuple[Span, ...]:
    """Compute the spans of ``split``; ``tokens`` gives (prefix, number of tokens) of each of its sources.

    Raises:
        DataError: a source is too short for one sample.
    """
    key, sources, _ = configured(config, split)
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
    """Return (first token, number of tokens) of ``split`` in a source of ``total`` tokens."""
    if config.valid:
        return 0, total
    if not 0 <= config.valid_fraction < 1:
        raise ConfigError.of("data.valid_fraction", config.valid_fraction, "must be at least 0 and below 1")
    # Held out even if the job never evaluates: otherwise switching evaluation on would change its training samples.
    held_out = int(total * config.valid_fraction)
    return (0, total - held_out) if split == "train" else (total - held_out, held_out)


def _too_short(config: DataConfig, split: str, total: int, count: int, seq_length: int) -> str:
    what = f"gives {split} {count} of its {total} tokens; must be at least model.seq_length + 1 = {seq_length + 1}"
    if config.valid:
        return what
    return f"{what} (data.valid_fraction={config.valid_fraction})"


def check_lists(config: DataConfig) -> None:
    """Check lists of sources and weights. Raises ConfigError if they contradict each other."""
    if not config.train:
        raise ConfigError.of("data.train", config.train, "must name at least one source")
    check_weights("data.train_weights", config.train_weights, len(config.train))
    if config.valid_weights is not None and not config.valid:
        raise ConfigError.of("data.valid_weights", config.valid_weights, "needs data.valid")
    check_weights("data.valid_weights", config.valid_weights, len(config.valid))
    for key, sources in (("data.train", config.train), ("data.valid", config.valid)):
        # Resolved: two paths to one file would read its tokens twice as often as its weight says.
        resolved = [source if source == stdlib.NAME else str(Path(source).resolve()) for source in sources]
        for position, source in enumerate(resolved):
            if source in resolved[:position]:
                raise ConfigError.of(f"{key}[{position}]", sources[position], "must not be named twice")
    shared = {str(Path(source).resolve()) for source in config.train} & {str(Path(s).resolve()) for s in config.valid}
    if shared:
        raise ConfigError.of("data.valid", config.valid, f"must not share {sorted(shared)[0]} with data.train")


def plan_split(config: DataConfig, seq_length: int, split: str, tokenizer: Tokenizer) -> SplitPlan:
    """Plan spans and order of ``split``; reads the indices and indexes the built-in corpus where needed.

    Raises:
        ConfigError: inconsistent lists or weights.
        DataError: a file is missing, damaged or too short.
    """
    check_lists(config)
    key, sources, _ = configured(config, split)
    prefixes = [source_prefix(config, source, tokenizer) for source in sources]
    infos = [read_info(f"{key}[{position}]", prefix) for position, prefix in enumerate(prefixes)]
    found = spans(config, seq_length, split, [(info.prefix, info.num_tokens) for info in infos])
    return SplitPlan(seq_length=seq_length, spans=found, order=sample_order(config, split, found))


def fingerprint(plan: SplitPlan) -> str:
    """Hexadecimal digest that differs where the order, the sources' sizes or their first and last tokens do.

    It does not see other tokens in the middle of a source of the same size.
    """
    digest = hashlib.blake2b(repr((plan.seq_length, plan.order)).encode(), digest_size=8)
    for span in plan.spans:
        # The ends only: every start of every rank computes this, whatever the size of the sources.
        edge = min(4096, span.num_tokens)
        digest.update(f"{span.first_token} {span.num_tokens}".encode())
        for start in (span.first_token, span.first_token + span.num_tokens - edge):
            digest.update(_read_tokens(span.prefix, start, edge).tobytes())
    return digest.hexdigest()


def _read_tokens(prefix: str, start: int, count: int) -> np.ndarray:
    dtype = read_dtype(prefix)
    tokens = np.fromfile(bin_path(prefix), dtype=dtype, count=count, offset=start * dtype.itemsize)
    return tokens.astype(np.int64)


def sample_order(config: DataConfig, split: str, found: Sequence[Span]) -> SampleOrder:
    """Create the order of the samples of ``found``, from ``data.seed`` and the split's weights."""
    weights = configured(config, split)[2]
    return SampleOrder(
        seed=config.seed,
        split=split,
        num_samples=tuple(span.num_samples for span in found),
        weights=None if weights is None else tuple(weights),
    )

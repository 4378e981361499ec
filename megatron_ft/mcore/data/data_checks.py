"""Opens the samples of a run, and checks that all ranks and the loaded checkpoint use the same data."""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ft.config.identity import JobIdentity, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.control.rundir import RunId
from megatron_ft.corpus.samples import Place, Span, SplitPlan, resolve_vocab_size, vocabulary_entries
from megatron_ft.corpus.tokenizers import build_tokenizer
from megatron_ft.errors import DataError
from megatron_ft.mcore.groups import Collectives
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.storage.files import write_atomically


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
        ConfigError, DataError: a source of this split is not valid; ``corpus.check.check_data`` raises the same errors.
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

"""Opens the samples of a run; checks that all ranks, and the checkpoint that is continued, have the same."""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_ft.config.identity import JobIdentity, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.control.run_id import read_run_id
from megatron_ft.corpus.check import resolve_vocab_size
from megatron_ft.errors import DataError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.data.samples import Samples, open_samples
from megatron_ft.snapshot.storage.files import write_atomically
from megatron_ft.strict_json import parse_json

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer

RUN_DATA_NAME = "data_fingerprint.json"


def open_splits(config: JobConfig) -> dict[str, Samples]:
    """Open the samples of ``train``, and of ``valid`` if the run evaluates."""
    splits = ["train"] + (["valid"] if config.training.eval_interval_iterations else [])
    return {split: open_samples(config, split) for split in splits}


def job_identity(config: JobConfig, run_dir: Path, samples: Samples) -> JobIdentity:
    """Return the identity of a job that trains on ``samples`` in ``run_dir``.

    Raises:
        ConfigError: the run's random id cannot be read.
    """
    known = read_run_id(run_dir)
    vocab_size = resolve_vocab_size(config)
    return JobIdentity(
        run_id=known.run_id,
        run_name=run_dir.name,
        settings=settings_of(config, data_fingerprint=samples.fingerprint(), vocab_size=vocab_size),
        takes_format_1=known.is_older,
    )


def check_same_data(config: JobConfig, samples: Samples, collectives: Collectives) -> None:
    """Check that all ranks read the same samples; collective.

    Raises:
        DataError: a rank reads other samples than rank 0.
    """
    fingerprints = collectives.gather(samples.fingerprint())
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise _other_data(config, rank, 0)


def note_run_data(samples: Samples, run_dir: Path) -> None:
    """Write the fingerprint of the run's data, for ranks that are started later; called by one rank.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(run_dir, RUN_DATA_NAME, json.dumps({"train": samples.fingerprint()}).encode())


def check_run_data(config: JobConfig, samples: Samples, run_dir: Path) -> None:
    """Compare a joining rank's samples with the run's before it joins, so that no membership fails because of it.

    If the run folder has no fingerprint, ``check_newcomers_data`` compares when ranks join.

    Raises:
        DataError: this rank reads other samples, or the file is damaged.
    """
    path = run_dir / RUN_DATA_NAME
    if not path.exists():
        return
    try:
        known = parse_json(path.read_bytes())["train"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: must contain the fingerprint of the run's data: {error}") from None
    if known != samples.fingerprint():
        raise DataError(
            f"data.train={config.data.train}: a rank that joins must read the run's data, whose fingerprint is in "
            f"{path}"
        )


def check_newcomers_data(trainer: "Trainer", fingerprints: Sequence[str], first: int) -> None:
    """Exclude joining ranks that read other samples than rank ``first``, which has state; before any state moves.

    If the others can survive, the process of such a rank ends here as if it had died, because an error that it raised
    would end the job. The others then form the next membership without it.

    Args:
        fingerprints: of every rank of the membership that is being formed.

    Raises:
        DataError: there is such a rank, and the others need it.
        RuntimeError: there is such a rank, and it ends.
    """
    strangers = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[first]]
    if not strangers:
        return
    error = _other_data(trainer.job, strangers[0], first)
    if not trainer.context.worker.can_survive:
        raise error
    if trainer.context.rank in strangers:
        _end_alone(_other_data(trainer.job, trainer.context.rank, first))
    # Like the error of a broken collective: the others then form the next membership.
    raise RuntimeError(f"ranks {strangers} cannot join: {error}")


def _end_alone(error: DataError) -> NoReturn:
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    # As a killed rank ends: an exception would be reported, and would end the job.
    os._exit(error.exit_code)


def _other_data(config: JobConfig, rank: int, first: int) -> DataError:
    return DataError(
        f"data.train={config.data.train}: must be the same data on every rank; rank {rank} and rank {first} read "
        "different data (a built-in corpus differs between Python versions: write it to an indexed dataset once "
        "and share that)"
    )


def check_known_data(config: JobConfig, samples: Samples, known: str | None, directory: Path) -> None:
    """Compare with ``known``, the fingerprint of the data that the checkpoint in ``directory`` was trained on, if it
    has one.

    Raises:
        DataError: the data differ, and ``checkpoint.allow_other_data`` is false.
    """
    if known is None or config.checkpoint.allow_other_data:
        return
    if known != samples.fingerprint():
        raise DataError(
            f"data.train={config.data.train}: must be the data that {directory.name} was trained on (same "
            "sources, weights, seed and sequence length); otherwise some samples are repeated and others "
            "skipped. To continue anyway set checkpoint.allow_other_data=true"
        )

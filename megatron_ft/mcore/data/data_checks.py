"""Opens the samples of a run, and checks that all ranks and the loaded checkpoint use the same data."""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_ft.config.identity import JobIdentity, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.control.run_id import RunId
from megatron_ft.corpus.check import resolve_vocab_size
from megatron_ft.errors import DataError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.data.samples import Samples, open_samples
from megatron_ft.snapshot.storage.files import write_atomically
from megatron_ft.strict_json import parse_json

RUN_DATA_NAME = "data_fingerprint.json"


def open_splits(config: JobConfig) -> dict[str, Samples]:
    """Open the samples of the split ``train``, and of ``valid`` if the run evaluates."""
    splits = ["train"] + (["valid"] if config.training.eval_interval_iterations else [])
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
    """Check, before this rank joins, that it reads the data whose fingerprint is in the run folder.

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

    If the job can continue without such a rank, the rank's process exits like a killed process, because an error that
    it raised would end the job. The other ranks then form the next membership without it.

    Args:
        fingerprints: data fingerprint of every rank of the new membership.

    Raises:
        DataError: a rank reads other samples, and the job cannot continue without it.
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
    # The same type as the error of a failed collective, after which the ranks form the next membership.
    raise RuntimeError(f"the ranks {strangers} cannot join: {error}")


def _end_alone(error: DataError) -> NoReturn:
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    # An exception would be reported and would end the job, so the process exits like a killed rank.
    os._exit(error.exit_code)


def _other_data(config: JobConfig, rank: int, first: int) -> DataError:
    return DataError(
        f"data.train={config.data.train} must be the same data on every rank, but rank {rank} and rank {first} read "
        "different data. The built-in corpus differs between Python versions: write it to an indexed dataset once, and "
        "use this dataset on all nodes"
    )


def check_known_data(config: JobConfig, samples: Samples, known: str | None, directory: Path) -> None:
    """Check that ``samples`` are the data on which the checkpoint in ``directory`` was trained.

    ``known`` is the fingerprint of the checkpoint's data; None, if the checkpoint has none, skips the check.

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

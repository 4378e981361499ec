"""The samples of a run: opened, and the same on every rank and in what is continued."""

from pathlib import Path

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import DataError
from megatron_ft.mcore.checkpoint.agreement import Agreement
from megatron_ft.mcore.data.samples import Samples, open_samples


def open_splits(config: JobConfig) -> dict[str, Samples]:
    """``train``, and ``valid`` where the run evaluates."""
    splits = ["train"] + (["valid"] if config.training.eval_interval_iterations else [])
    return {split: open_samples(config, split) for split in splits}


def check_same_data(config: JobConfig, samples: Samples, agreement: Agreement) -> None:
    """Collective.

    Raises:
        DataError: a rank reads other samples than rank 0.
    """
    fingerprints = agreement.gather(samples.fingerprint())
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise DataError(
                f"data.train={config.data.train}: must be the same data on every rank; rank {rank} reads "
                "other data than rank 0 (a built-in corpus differs between Python versions: index one and share it)"
            )


def check_known_data(config: JobConfig, samples: Samples, known: str | None, directory: Path) -> None:
    """Compare with the fingerprint ``known`` that the checkpoint in ``directory`` was trained on, if it has one.

    Raises:
        DataError: it was trained on other samples, and ``checkpoint.allow_other_data`` is off.
    """
    if known is None or config.checkpoint.allow_other_data:
        return
    if known != samples.fingerprint():
        raise DataError(
            f"data.train={config.data.train}: must be what {directory.name} was trained on (sources, weights, "
            "seed, sequence length), or samples are repeated and left out; checkpoint.allow_other_data=true goes on"
        )

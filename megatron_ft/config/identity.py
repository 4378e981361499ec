"""Settings that identify a job: run, data, model, optimizer and learning-rate schedule.

A resumed run may change its layout (parallel sizes, replicas) and keys of telemetry, snapshots, launch and recovery.
Such keys therefore do not belong to the identity.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.config.job import JobConfig

JsonValue = Any
Settings = Mapping[str, Mapping[str, JsonValue]]
"""Maps each concern (``data``, ``model``, ``optimizer``, ``schedule``) to the values of its keys, by dotted key."""

FINGERPRINT = "data.fingerprint"
_IGNORED_MODEL_KEYS = (
    "name",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "published_parameters",
    "published_active_parameters",
    "published_parameters_source",
)
"""Keys of ``model`` that are not compared. They affect training only through the vocabulary size, which is compared."""
# Only the fingerprint decides whether data are equal. These keys are stored so that a message can name the change.
_DATA_KEYS = ("train", "train_weights", "valid_fraction", "tokenizer", "seed")
DOCUMENT_KEYS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
"""Keys of ``data`` that change how ends of documents are treated. The data fingerprint depends on their values."""
_OPTIMIZER_KEYS = ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key that has different values in this job and in a checkpoint or window."""

    concern: str
    """Concern (group of compared settings) of the key: ``data``, ``model``, ``optimizer`` or ``schedule``."""
    key: str
    """Dotted configuration key."""
    stored: JsonValue
    """Value in the checkpoint or window."""
    present: JsonValue
    """Value in this job."""
    advice: str = ""
    """Advice or explanation, e.g. the override that keeps the stored value of a derived key. May be empty."""

    def __str__(self) -> str:
        text = f"{self.key}: was {_shown(self.stored)}, now {_shown(self.present)}"
        return f"{text} ({self.advice})" if self.advice else text

    @classmethod
    def between(cls, stored: Settings, present: Settings) -> "list[Difference]":
        """List the differences between ``stored`` settings of a checkpoint or window and ``present`` settings of the
        job.

        Data with equal fingerprints are equal even if their paths differ, because files may have been moved. A key that
        is missing in ``stored`` or ``present`` counts as null. Later versions can therefore add keys with default null.
        """
        found = _data_differences(stored.get("data", {}), present.get("data", {}))
        for concern in sorted({*stored, *present} - {"data"}):
            before, now = stored.get(concern, {}), present.get(concern, {})
            found += [
                cls(
                    concern=concern,
                    key=key,
                    stored=before.get(key),
                    present=now.get(key),
                    advice=f"set {key}={before.get(key)} to keep the earlier value" if key in _DERIVED else "",
                )
                for key in sorted({*before, *now})
                if before.get(key) != now.get(key)
            ]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """Identity of a job. A checkpoint or window contains the identity of the job that wrote it; loading checks it."""

    run_id: str
    """Random name of the run, stored in its folder."""
    run_name: str
    """Name of the run's folder, for messages. Checkpoints and windows of format 1 contain no ``run_id``, so this name
    identifies their run."""
    settings: Settings
    """Settings that determine the training result of this job (see ``settings_of``)."""
    allow_change: tuple[str, ...] = ()
    """Keys whose values may differ between this job and the saved state (``run.allow_change``)."""
    takes_format_1: bool = False
    """Whether the run began before runs had a ``run_id``, so that its checkpoints and windows may have format 1."""

    def not_of_run(self, *, run_id: str, run_name: str, format_version: int) -> str | None:
        """Compare the run that wrote a checkpoint or window with this run. Return None if they are one run. Otherwise
        return the reason why they are not, for an error message.

        Args:
            run_id: id of the run that wrote the checkpoint or window; in format 1, the name of the run's folder.
            run_name: name of the folder of the run that wrote the checkpoint or window.
            format_version: version of the format of the checkpoint or window.
        """
        # Folders may be renamed or copied, so only the random name identifies a run.
        if format_version > 1:
            if run_id == self.run_id:
                return None
            return f"belongs to another run, {run_name} ({run_id}); this run is {self.run_name} ({self.run_id})"
        if not self.takes_format_1:
            return "belongs to another run: it has format 1, but this run has written format 2 since its start"
        return None if run_id == self.run_name else f"belongs to another run, {run_id}; this run is {self.run_name}"


def settings_of(config: JobConfig, *, data_fingerprint: str, vocab_size: int) -> dict[str, dict[str, JsonValue]]:
    """Collect the settings that determine the result of training, as plain JSON values.

    Args:
        data_fingerprint: digest of the training samples and their order.
        vocab_size: entries of the model's vocabulary, including padding.

    Returns:
        Mapping of each concern (``data``, ``model``, ``optimizer``, ``schedule``) to values by dotted key.
    """
    data, model, optimizer = asdict(config.data), asdict(config.model), asdict(config.optimizer)
    precision = asdict(config.precision)
    if not config.precision.has_histories:
        # Without histories the key has no effect. It is stored as null, like in older files, which lack the key.
        precision["fp8_amax_history_length"] = None
    return {
        "data": {
            FINGERPRINT: data_fingerprint,
            "model.seq_length": config.model.seq_length,
            **{f"data.{name}": data[name] for name in _DATA_KEYS},
            # False is stored as null. Older files lack these keys, and a missing key also counts as null.
            **{f"data.{name}": data[name] or None for name in DOCUMENT_KEYS},
        },
        "model": {
            "model.vocab_size": vocab_size,
            # The seed determines the initial weights.
            "training.seed": config.training.seed,
            **{f"model.{name}": value for name, value in model.items() if name not in _IGNORED_MODEL_KEYS},
        },
        "optimizer": {
            **{f"optimizer.{name}": optimizer[name] for name in _OPTIMIZER_KEYS},
            **{f"precision.{name}": value for name, value in precision.items()},
            "parallel.use_distributed_optimizer": config.parallel.use_distributed_optimizer,
            "training.frozen": config.training.frozen,
        },
        "schedule": _schedule(config),
    }


_DERIVED = (
    *("optimizer.lr_decay_iterations", "optimizer.lr_warmup_iterations"),
    *("optimizer.lr_decay_samples", "optimizer.lr_warmup_samples"),
)
"""Keys for which null means a value derived from the run's length. ``Settings`` contain the derived value."""


def _schedule(config: JobConfig) -> dict[str, JsonValue]:
    options, num_iterations = config.optimizer, config.training.train_iterations
    by_samples = config.training.train_samples is not None
    warmup, decay, wsd_decay = options.num_samples(config.training) if by_samples else (None, None, None)
    schedule: dict[str, JsonValue] = {
        "training.global_batch_size": config.training.global_batch_size,
        "optimizer.lr": options.lr,
        "optimizer.lr_decay_style": options.lr_decay_style,
        "optimizer.lr_warmup_init": options.lr_warmup_init,
        # Store the derived number instead of null, because null means another number in a longer run.
        "optimizer.lr_warmup_iterations": None if by_samples else options.num_warmup_iterations(num_iterations),
        "optimizer.lr_warmup_samples": warmup,
        "training.rampup_batch_size": config.training.rampup_batch_size,
    }
    # A key that has no effect with this decay style is left out, so that its value cannot prevent a resume.
    if options.lr_decay_style != "constant":
        schedule["optimizer.min_lr"] = options.min_lr
        schedule["optimizer.lr_decay_iterations"] = None if by_samples else options.num_decay_iterations(num_iterations)
        schedule["optimizer.lr_decay_samples"] = decay
    if options.lr_decay_style == "WSD":
        schedule["optimizer.lr_wsd_decay_iterations"] = options.lr_wsd_decay_iterations
        schedule["optimizer.lr_wsd_decay_samples"] = wsd_decay
        schedule["optimizer.lr_wsd_decay_style"] = options.lr_wsd_decay_style
    return schedule


def _data_differences(stored: Mapping[str, JsonValue], present: Mapping[str, JsonValue]) -> list[Difference]:
    # With equal fingerprints the data are equal. Then keys are not compared, because moved files have other paths.
    if stored.get(FINGERPRINT) == present.get(FINGERPRINT):
        return []
    keys = sorted(key for key in {*stored, *present} - {FINGERPRINT} if stored.get(key) != present.get(key))
    if keys:
        return [Difference(concern="data", key=key, stored=stored.get(key), present=present.get(key)) for key in keys]
    advice = "the files contain different tokens"
    before, now = stored.get(FINGERPRINT), present.get(FINGERPRINT)
    return [Difference(concern="data", key=FINGERPRINT, stored=before, present=now, advice=advice)]


def _shown(value: JsonValue) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)[:200]

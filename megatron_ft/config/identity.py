"""What makes a job this job: its run, its data, its model, its optimizer and its learning-rate schedule.

Checkpoints and windows record it, and a job compares it before it loads one. The layout (nodes, ranks, parallel
sizes, replicas), reports, snapshots and launch keys are no part of it: they may change from start to start.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.config.job import JobConfig

JsonValue = Any
Settings = Mapping[str, Mapping[str, JsonValue]]
"""Concern to dotted key to value."""

FINGERPRINT = "data.fingerprint"
_NAMES_OF_THE_MODEL = (
    "name",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "published_parameters",
    "published_active_parameters",
    "published_parameters_source",
)
"""Keys of ``model`` that change no iteration, or that the size of the vocabulary stands for."""
_DATA_KEYS = ("train", "train_weights", "valid_fraction", "tokenizer", "seed")
_OPTIMIZER_KEYS = ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key in which a checkpoint or a window differs from the job."""

    concern: str
    """``data``, ``model``, ``optimizer`` or ``schedule``."""
    key: str
    """Dotted configuration key."""
    stored: JsonValue
    """Value that the checkpoint or the window was written with."""
    present: JsonValue
    """Value of the job."""
    advice: str = ""
    """What keeps the stored value, where that is not the key itself."""

    def __str__(self) -> str:
        text = f"{self.key}: was {_shown(self.stored)}, now {_shown(self.present)}"
        return f"{text} ({self.advice})" if self.advice else text


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """The identity of a job, as it writes it and as it compares it."""

    run_id: str
    """Random name of the run, kept in its folder."""
    run_name: str
    """Name of the run's folder, for messages and for files of format 1, which know the run by it."""
    settings: Settings
    """``settings_of`` the job."""
    takes_format_1: bool = False
    """Whether the run is older than its ``run_id``: then files of format 1 can be its own."""

    def not_of_run(self, *, run_id: str, run_name: str, format_version: int) -> str | None:
        """Why what says this of itself is not of this run; None where it is.

        Args:
            run_id: as recorded; in format 1 the name of the run's folder.
        """
        if format_version > 1:
            if run_id == self.run_id:
                return None
            return f"is of another run, {run_name} ({run_id}); this is {self.run_name} ({self.run_id})"
        if not self.takes_format_1:
            return "is of format 1, and this run was begun by a version that writes format 2: it is not of this run"
        return None if run_id == self.run_name else f"is of another run, {run_id}; this is {self.run_name}"


def settings_of(config: JobConfig, *, data_fingerprint: str, vocab_size: int) -> dict[str, dict[str, JsonValue]]:
    """What decides what the job's iterations compute, by concern, as plain JSON values.

    Args:
        data_fingerprint: digest of the training samples and their order.
        vocab_size: entries of the model's vocabulary, padding included.
    """
    data, model, optimizer = asdict(config.data), asdict(config.model), asdict(config.optimizer)
    return {
        "data": {
            FINGERPRINT: data_fingerprint,
            "model.seq_length": config.model.seq_length,
            **{f"data.{name}": data[name] for name in _DATA_KEYS},
        },
        "model": {
            "model.vocab_size": vocab_size,
            "training.seed": config.training.seed,
            **{f"model.{name}": value for name, value in model.items() if name not in _NAMES_OF_THE_MODEL},
        },
        "optimizer": {
            **{f"optimizer.{name}": optimizer[name] for name in _OPTIMIZER_KEYS},
            **{f"precision.{name}": value for name, value in asdict(config.precision).items()},
            "parallel.use_distributed_optimizer": config.parallel.use_distributed_optimizer,
        },
        "schedule": _schedule(config),
    }


def differences(stored: Settings, present: Settings) -> list[Difference]:
    """What ``stored``, of a checkpoint or a window, has otherwise than ``present``, of a job; by concern and key.

    Data are the same where their fingerprints are: files may have moved. A key that only one of them has counts as
    null in the other, so that a key with a default of null may come later.
    """
    found = _data_differences(stored.get("data", {}), present.get("data", {}))
    for concern in sorted({*stored, *present} - {"data"}):
        before, now = stored.get(concern, {}), present.get(concern, {})
        found += [
            Difference(
                concern=concern,
                key=key,
                stored=before.get(key),
                present=now.get(key),
                advice=f"{key}={before.get(key)} keeps it" if key in _DERIVED else "",
            )
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
    return found


_DERIVED = ("optimizer.lr_decay_iterations", "optimizer.lr_warmup_iterations")
"""Keys whose null follows from ``training.train_iterations``: here with what it came to."""


def _schedule(config: JobConfig) -> dict[str, JsonValue]:
    """The learning rate as a function of the iteration, by the keys that decide it."""
    options, num_iterations = config.optimizer, config.training.train_iterations
    schedule: dict[str, JsonValue] = {
        "training.global_batch_size": config.training.global_batch_size,
        "optimizer.lr": options.lr,
        "optimizer.lr_decay_style": options.lr_decay_style,
        "optimizer.lr_warmup_init": options.lr_warmup_init,
        "optimizer.lr_warmup_iterations": options.num_warmup_iterations(num_iterations),
    }
    if options.lr_decay_style != "constant":
        schedule["optimizer.min_lr"] = options.min_lr
        schedule["optimizer.lr_decay_iterations"] = options.num_decay_iterations(num_iterations)
    if options.lr_decay_style == "WSD":
        schedule["optimizer.lr_wsd_decay_iterations"] = options.lr_wsd_decay_iterations
        schedule["optimizer.lr_wsd_decay_style"] = options.lr_wsd_decay_style
    return schedule


def _data_differences(stored: Mapping[str, JsonValue], present: Mapping[str, JsonValue]) -> list[Difference]:
    if stored.get(FINGERPRINT) == present.get(FINGERPRINT):
        return []
    keys = sorted(key for key in {*stored, *present} - {FINGERPRINT} if stored.get(key) != present.get(key))
    if keys:
        return [Difference(concern="data", key=key, stored=stored.get(key), present=present.get(key)) for key in keys]
    advice = "the files hold other tokens"
    before, now = stored.get(FINGERPRINT), present.get(FINGERPRINT)
    return [Difference(concern="data", key=FINGERPRINT, stored=before, present=now, advice=advice)]


def _shown(value: JsonValue) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)[:200]

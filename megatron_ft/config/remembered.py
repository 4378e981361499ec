"""Determines the configuration with which a resumed run continues: that of its newest job, changed by the overrides of
the command line."""

import copy
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.identity import FINGERPRINT, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import close_matches, from_dict, to_dict
from megatron_ft.errors import ConfigError

_OF_ONE_JOB = (
    *("run.dir", "run.name", "run.resume", "run.start_over", "dry_run", "dry_run_format"),
    *("training.exit_at_iteration", "training.exit_interval_iterations", "training.exit_after_minutes"),
    *("training.evaluate_only", "launch.forkserver_socket", "launch.master_port"),
    *("testing.failpoints", "testing.membership_schedule", "checkpoint.allow_other_data"),
)
"""Keys that apply to one job only. A later job of the run does not use their values."""
_FREE_MODEL_KEYS = (
    *("training.seed", "model.hidden_dropout", "model.attention_dropout", "model.init_method_std"),
    *("model.moe_aux_loss_coeff", "model.moe_z_loss_coeff", "model.moe_router_load_balancing_type"),
    *("model.moe_router_bias_update_rate", "model.moe_expert_capacity_factor", "model.moe_token_drop_policy"),
    *("model.moe_pad_expert_input_to_capacity", "model.seq_length"),
)
"""Keys of the concern ``model`` that do not determine which weights exist. Saved state fits any of their values."""
_SCHEDULE_KEYS = (
    *("optimizer.min_lr", "optimizer.lr_decay_iterations", "optimizer.lr_wsd_decay_iterations"),
    *("optimizer.lr_decay_samples", "optimizer.lr_wsd_decay_samples", "optimizer.lr_wsd_decay_style"),
)
"""Keys that only some values of ``optimizer.lr_decay_style`` use. With other values, a resumed run may change them."""
_FORMAT_KEYS = ("parallel.use_distributed_optimizer", "precision.params_dtype", "precision.regime")
"""Keys that determine which optimizer state exists. Saved state fits only the values with which it was saved."""
_SAMPLES_KEYS = ("training.global_batch_size", "training.rampup_batch_size")
"""Keys that, together with the number of an iteration, determine which samples the iteration reads."""
_DERIVED = "# Derived; as given: "
"""First words of a comment in ``config.yaml``. The comment contains the values that the user gave for derived keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key whose value differs from its value in the run's newest job."""

    key: str
    before: Any
    now: Any
    concern: str | None
    """Concern of the key (``data``, ``model``, ``optimizer`` or ``schedule``) if the key determines the result of
    training, otherwise None."""
    follows: bool = False
    """Whether only the earlier job or only the new job uses the key, because another key was changed. For example,
    ``optimizer.min_lr`` has no effect if the learning rate is constant."""

    @property
    def obstacle(self) -> str | None:
        """Reason why the run cannot use the new value even if ``run.allow_change`` names the key; None if it can."""
        if self.key in _SAMPLES_KEYS:
            return "the batch size determines the position in the data, so the run would skip or repeat samples"
        is_shape = self.concern == "model" and self.key not in _FREE_MODEL_KEYS
        return "the run's saved state fits only the earlier value" if is_shape or self.key in _FORMAT_KEYS else None

    def __str__(self) -> str:
        """Return a text with the key, its earlier value and its new value."""
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}"


def check_names(allowed: Iterable[str], config: JobConfig) -> None:
    """Check that ``run.allow_change`` contains only keys that determine the result of training.

    Raises:
        ConfigError: ``allowed``, the value of ``run.allow_change``, contains another key.
    """
    known = {*_flat_settings(config), *_SCHEDULE_KEYS}
    for key in allowed:
        if key not in known:
            constraint = "must contain only keys of data, model, optimizer and schedule; other keys need no permission"
            raise ConfigError.of("run.allow_change", key, constraint + close_matches(key, known))


def continued(recorded: JobConfig, given: JobConfig, defaults: JobConfig, named: Iterable[str]) -> JobConfig:
    """Return the configuration with which a run continues.

    Args:
        recorded: configuration of the run's newest job.
        given: configuration that the command line would give for a new run.
        defaults: configuration that a command line without overrides would give.
        named: keys and groups that the command line names, e.g. ``optimizer.lr`` or ``model``.
    """
    keys = [key for key in named if "." in key]
    groups = {key for key in named if "." not in key}
    before, own, plain = (_flat(to_dict(config)) for config in (recorded, given, defaults))
    values: dict[str, Any] = {}
    two_levels = {key for key in keys if key.count(".") == 1}
    inside = {key: ".".join(key.split(".")[:2]) for key in keys if key.count(".") > 1}
    for key in own:
        is_named = key in two_levels or key.partition(".")[0] in groups or key in _OF_ONE_JOB
        # An option of ``experiment`` sets keys that ``named`` does not contain. They differ from their defaults.
        if is_named or (own[key] != plain[key] and key not in inside.values()):
            values[key] = own[key]
    for key, mapping in inside.items():
        values[mapping] = _with_entry(values.get(mapping, before[mapping]), own[mapping], key.split(".")[2:])
    return with_values(recorded, values)


def _with_entry(present: Any, given: Any, path: Sequence[str]) -> Any:
    """Return a copy of the mapping ``present`` in which the entry at ``path`` has its value from ``given``."""
    merged = copy.deepcopy(present) if isinstance(present, dict) else {}
    target = merged
    for name in path[:-1]:
        given = given[name]
        target = target.setdefault(name, {})
    target[path[-1]] = given[path[-1]]
    return merged


def changes(recorded: JobConfig, now: JobConfig) -> list[Change]:
    """List the keys that differ between ``recorded`` (run's newest job) and ``now``, in the configuration's order.

    Keys that apply to one job only are left out. Derived values of the schedule are listed if they differ, e.g.
    ``optimizer.lr_decay_iterations`` after a change of ``training.train_iterations``.
    """
    before, after = (_flat(to_dict(config)) for config in (recorded, now))
    settings = [_flat_settings(config) for config in (recorded, now)]
    found = []
    for key in dict.fromkeys([*after, *settings[0], *settings[1]]):
        concern = next((each[key][0] for each in settings if key in each), None)
        values = [each[key][1] if key in each else None for each in settings]
        if concern is None or values[0] == values[1]:
            concern, values = None, [before.get(key), after.get(key)]
        if values[0] != values[1] and key not in (*_OF_ONE_JOB, "run.allow_change"):
            follows = concern is not None and not all(key in each for each in settings)
            found.append(Change(key=key, before=values[0], now=values[1], concern=concern, follows=follows))
    return found


def _flat_settings(config: JobConfig) -> dict[str, tuple[str, Any]]:
    """Map each key that determines the result of training to its concern and value."""
    settings = settings_of(config, data_fingerprint="", vocab_size=config.model.vocab_size or 0)
    return {
        key: (name, value) for name, values in settings.items() for key, value in values.items() if key != FINGERPRINT
    }


def check_allowed(found: Sequence[Change], allowed: Collection[str]) -> list[str]:
    """Refuse changes of what the run trains (data, model, optimizer, schedule), unless the user allows them.

    Args:
        allowed: ``run.allow_change`` of the command line.

    Returns:
        List of the keys in ``allowed``, and of the keys whose effect began or ceased because of an allowed change.

    Raises:
        ConfigError: a change is not allowed, or the run cannot continue with it.
    """
    meaning = [change for change in found if change.concern is not None and not change.follows]
    follows = [change.key for change in found if change.follows]
    impossible = [f"{change}: {change.obstacle}" for change in meaning if change.obstacle is not None]
    if impossible:
        raise ConfigError(f"{'; '.join(impossible)}. Leave the key out, or begin another run")
    refused = [change for change in meaning if change.key not in allowed]
    if refused:
        listed = ",".join([*allowed, *(change.key for change in refused)])
        concerns = " and ".join(dict.fromkeys(f"{change.concern}" for change in refused))
        kept = " ".join(f"{change.key}={_shown(change.before)}" for change in refused)
        raise ConfigError(
            f"{'; '.join(map(str, refused))}: would change {concerns} of the run. Keep the earlier value ({kept}), "
            f"or allow the change with 'run.allow_change=[{listed}]'"
        )
    return [*allowed, *follows]


def with_given_values(config_yaml: str, given: JobConfig, used: JobConfig) -> str:
    """Return the text of ``config.yaml``, with a comment that contains the values which the user gave for derived keys.

    Derived keys depend on nodes and devices. A later job may have other nodes or devices, so it derives the keys again.
    """
    before, after = _flat(to_dict(given)), _flat(to_dict(used))
    derived = {key: value for key, value in before.items() if value != after[key] and key not in _OF_ONE_JOB}
    return f"{_DERIVED}{json.dumps(derived)}\n{config_yaml}" if derived else config_yaml


def given_values(config_yaml: str) -> Mapping[str, Any]:
    """Return the values that the user gave for derived keys, from the text of ``config.yaml``.

    Raises:
        ValueError: the comment is damaged.
    """
    line = config_yaml.partition("\n")[0]
    found = json.loads(line.removeprefix(_DERIVED)) if line.startswith(_DERIVED) else {}
    if not isinstance(found, dict):
        raise ValueError(f"the comment in line 1 must contain a mapping, not {found!r}")
    return found


def with_values(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """Return ``config`` with the given ``values`` of dotted keys.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    tree = to_dict(config)
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        (tree[group] if group else tree)[name] = value
    return from_dict(tree)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Map each dotted key of a configuration to its value. A value that is a mapping is not flattened."""
    flat: dict[str, Any] = {}
    for group, values in tree.items():
        if isinstance(values, Mapping):
            flat |= {f"{group}.{name}": value for name, value in values.items()}
        else:
            flat[group] = values
    return flat


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)[:200]

"""Checks overrides, with error messages that suggest similar names, and writes overrides. Does not use Hydra."""

import difflib
import functools
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ft.config.docs import KeyDoc, group_docs, key_docs
from megatron_ft.config.moved import MOVED
from megatron_ft.config.serialize import close_matches
from megatron_ft.errors import ConfigError


def group_options(*confs: Path) -> dict[str, list[str]]:
    """Map each group of keys to its options: the names of the YAML files in ``<folder of confs>/<group>``."""
    folders = [path for conf in confs for path in sorted(conf.iterdir()) if path.is_dir()]
    options: dict[str, list[str]] = {}
    for folder in folders:
        found = {*options.get(folder.name, ()), *(path.stem for path in folder.glob("*.yaml"))}
        options[folder.name] = sorted(found)
    return options


def check_moved(overrides: Iterable[tuple[str, str]]) -> None:
    """Refuse keys that were moved to another group. The error message contains the overrides to write instead.

    Args:
        overrides: key and text of each override, e.g. ``("launch.interface", "launch.interface=lo")``.

    Raises:
        ConfigError: an override uses the old name of a key.
    """
    lines = []
    for key, text in overrides:
        if new := MOVED.get(key):
            given = text.lstrip("+")
            lines.append(f"{given}: is now {new}; write {shlex.quote(given.replace(key, new, 1))}")
    if lines:
        raise ConfigError("\n".join(lines))


def check_override(key: str, value: Any, *confs: Path, deletes: bool, sweeps: bool) -> None:
    """Check that one override names an existing key, group or option, and is neither a sweep nor a deletion.

    Raises:
        ConfigError: the key, group or option is unknown, or the override is a sweep or deletes a key.
    """
    if sweeps:
        constraint = "must be a single value; add --multirun to run one job for each value"
        raise ConfigError.of(key, value, constraint)
    groups = group_options(*confs)
    if deletes:
        raise ConfigError(f"~{key}: must not be deleted, because every key needs a value; set another value or null")
    if key in groups:
        _check_options(key, value, groups[key])
    elif key not in _known_keys() and open_key(key) is None:
        raise ConfigError.of(key, value, "is not a known key" + _near(key, [*groups, *_known_keys()]))


def flag_error(argument: str) -> ConfigError:
    """Make the error for a flag such as ``--num-layers``. Only ``--help`` and ``--version`` are supported."""
    flag, _, value = argument.lstrip("-").partition("=")
    name = flag.replace("-", "_")
    keys = [key for key in _known_keys() if key.rpartition(".")[2] == name]
    keys = keys or [new for old, new in MOVED.items() if old.rpartition(".")[2] == name]
    if keys:
        return ConfigError(f"{argument}: must be written as {keys[0]}={value or '<value>'} (docs/from-megatron-lm.md)")
    return ConfigError(f"{argument}: must be --help or --version, or a key written as key=value")


def explain(error: BaseException, given: Mapping[str, Any]) -> ConfigError:
    """Convert an exception of Hydra or OmegaConf to ``ConfigError``. ``given`` maps overridden keys to values."""
    causes = list(_causes(error))
    for cause in causes:
        mark = getattr(cause, "problem_mark", None)  # errors in YAML files have it
        if mark is not None:
            problem = getattr(cause, "problem", None) or "it cannot be read"
            return ConfigError(f"{mark.name}: line {mark.line + 1} must be valid YAML: {problem}")
        key = str(getattr(cause, "full_key", None) or "")
        if key:
            return _explain_key(key, cause, given)
    return ConfigError(" ".join(str(causes[-1]).split()))


@functools.cache  # needed once for each override of a command
def _known_keys() -> Mapping[str, KeyDoc]:
    """Map every key to its documentation."""
    return {doc.key: doc for doc in key_docs()}


def open_key(key: str) -> str | None:
    """Return the key of a mapping with arbitrary entries if ``key`` is this key or names one of the entries:
    ``snapshot.policy`` for ``snapshot.policy`` and for ``snapshot.policy._target_``. Otherwise return None."""
    opened = [doc.key for doc in _known_keys().values() if doc.type.startswith("dict")]
    return next((name for name in opened if key == name or key.startswith(f"{name}.")), None)


def override_words(default: Mapping[str, Any], wanted: Mapping[str, Any], *, always: Iterable[str] = ()) -> list[str]:
    """Return the overrides that turn the configuration ``default`` into ``wanted``; both are results of ``to_dict``.

    An override cannot remove entries of a mapping such as ``snapshot.policy``, because Hydra merges the entries with
    the default. So callers must compose the overrides and compare the result with ``wanted``.

    Args:
        always: keys whose overrides are returned even if they have their default value.
    """
    words = []
    for group, values in wanted.items():
        if not isinstance(values, Mapping):
            words += [f"{group}={grammar_value(values)}"] if values != default.get(group) else []
            continue
        for name, value in values.items():
            if value != default.get(group, {}).get(name) or f"{group}.{name}" in always:
                words.append(f"{group}.{name}={grammar_value(value)}")
    return words


_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.:-]*")
_OTHER_THAN_TEXT = ("null", "true", "false", "nan", "inf")


def grammar_value(value: Any) -> str:
    """Write a value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{grammar_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(grammar_value, value)) + "]"
    if isinstance(value, (int, float)) or (_PLAIN.fullmatch(value) and value.lower() not in _OTHER_THAN_TEXT):
        return str(value)
    # Escape quotation marks, and backslashes directly before a quotation mark or before the closing one.
    escaped = re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + ("\\" if match[2] else "") + match[2], value)
    return f'"{escaped}"'


def _check_options(group: str, value: Any, options: list[str]) -> None:
    if isinstance(value, dict) or value is None:
        return
    for option in value if isinstance(value, list) else [value]:
        if str(option) not in options:
            constraint = f"must be one of {', '.join(options)}{close_matches(str(option), options)}"
            raise ConfigError.of(group, option, constraint)


def _explain_key(key: str, cause: BaseException, given: Mapping[str, Any]) -> ConfigError:
    plain = key.partition("[")[0]
    reason = str(getattr(cause, "msg", None) or cause).splitlines()[0]
    value = _given(plain, given)
    if plain in MOVED:
        return ConfigError.of(key, value, f"is now {MOVED[plain]}")
    documented = _known_keys().get(plain)
    if documented is not None and "nterpolation" not in type(cause).__name__:
        return ConfigError.of(key, value, f"must be of type {documented.type}{_right_type(documented, value, reason)}")
    if documented is not None:
        return ConfigError.of(key, value, f"must refer only to keys that exist ({reason})")
    if plain == "experiment" and plain in given:
        constraint = "must name a file that begins with the line '# @package _global_', as it sets keys of any group"
        return ConfigError.of(key, value, constraint)
    if plain in group_docs():
        return ConfigError.of(key, value, f"must be a mapping of keys to values for the group {plain} ({reason})")
    return ConfigError.of(key, value, "is not a known key" + _near(plain, list(_known_keys())))


def _right_type(key: KeyDoc, value: Any, reason: str) -> str:
    """Return the end of an error message about a wrong type: a correction of ``value`` if known, else ``reason``."""
    group = key.key.partition(".")[0]
    if key.type.startswith("dict"):
        return f"; choose an option of conf/{group} with {group}=<option>, and set its entries with {key.key}.<entry>="
    if key.type.startswith("list") and value is not None and not isinstance(value, (list, dict)):
        # No list has entries of type bool, so ``true`` is not proposed as an entry.
        return f"; write {key.key}=[{'<entry>,<entry>' if isinstance(value, bool) else value}]"
    if key.type.startswith("int") and isinstance(value, float) and value.is_integer():
        return f"; write {key.key}={int(value)}"
    return f" ({reason})"


def _given(key: str, given: Mapping[str, Any]) -> Any:
    # Return the value of ``key=value`` or ``group={key: value}``. Without either, return a text that names conf/.
    if key in given:
        return given[key]
    group, _, name = key.partition(".")
    inner = given.get(group)
    return inner.get(name, "?") if isinstance(inner, dict) else "(in a file under conf/)"


def _near(key: str, known: Iterable[str]) -> str:
    keys, last = list(known), key.rpartition(".")[2]
    ends = [candidate for candidate in keys if candidate.rpartition(".")[2] == last]
    if ends:
        return "; did you mean " + " or ".join(repr(end) for end in ends[:3]) + "?"
    leaves = {candidate.rpartition(".")[2]: candidate for candidate in keys}
    similar = difflib.get_close_matches(last, list(leaves), n=3, cutoff=0.7)
    if similar:
        return "; did you mean " + " or ".join(repr(leaves[leaf]) for leaf in similar) + "?"
    return close_matches(key, keys)


def _causes(error: BaseException | None) -> "list[BaseException]":
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain

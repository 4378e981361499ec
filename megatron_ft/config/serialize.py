"""Converts ``JobConfig`` to plain dictionaries and back, and creates policies from them. Does not use Hydra.

A policy is an object of a frozen dataclass that a configuration names by ``_target_``. Another package can add a policy
with a class and a YAML file; no registry has to be edited. Only frozen dataclasses are created. This rule catches
mistakes but is no protection: even a dry run imports the module in ``_target_``, and the import runs code of the
module. Users who can write a configuration can therefore run code (SECURITY.md).
"""

import dataclasses
import difflib
import importlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, get_origin, get_type_hints

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config dataclass to nested dictionaries, lists and scalars, all of JSON types."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> JobConfig:
    """Convert dictionaries that ``to_dict`` has made back to a ``JobConfig``.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    return _build(JobConfig, values, "")


def close_matches(word: str, known: typing.Iterable[str]) -> str:
    """Return a suggestion like ``; did you mean 'a' or 'b'?``, or an empty string if no known word is similar."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return "; did you mean " + " or ".join(repr(match) for match in found) + "?" if found else ""


def type_name(annotation: Any) -> str:
    """Return the name of a type in the terms of YAML, for documentation and messages, e.g. ``int or null``."""
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return f"list of {type_name(typing.get_args(annotation)[0])}"
    return str(getattr(annotation, "__name__", annotation))


def _build(cls: type[T], values: Any, prefix: str) -> T:
    if not isinstance(values, dict):
        raise ConfigError.of(prefix.rstrip("."), values, "must be a mapping of keys to values")
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise ConfigError.of(f"{prefix}{key}", values[key], f"is not a known key{close_matches(str(key), hints)}")
    return cls(**{key: _convert(hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def _convert(annotation: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _build(annotation, value, f"{key}.")
    if not _fits(annotation, value):
        raise ConfigError.of(key, repr(value), f"must be of type {type_name(annotation)}")
    return float(value) if annotation is float else value


def _fits(annotation: Any, value: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_fits(argument, value) for argument in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return isinstance(value, list) and all(_fits(typing.get_args(annotation)[0], item) for item in value)
    if typing.get_origin(annotation) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if annotation is typing.Any:
        return True
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    # In Python, bool is a subclass of int, so ``true`` would be accepted as 1.
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def build_policy(key: str, spec: Mapping[str, Any]) -> Any:
    """Create the policy that ``spec``, the value of ``key``, describes.

    ``_target_`` names the class of the policy; the other entries are fields. If the type of a field is a dataclass, its
    entry is a mapping, in which ``_target_`` may name another class. Lists become tuples for fields of type tuple.

    Raises:
        ConfigError: ``spec`` has no ``_target_``, a ``_target_`` names no frozen dataclass, or the other entries do not
            fit the fields.
    """
    found = find_target(key, spec)
    # Each rank builds its own policies. A policy with mutable state could make different plans on different ranks.
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or not _is_frozen(found):
        raise ConfigError.of(f"{key}._target_", spec["_target_"], "must be the path of a frozen dataclass")
    return _build_fields(key, found, {field: value for field, value in spec.items() if field != "_target_"})


def find_target(key: str, spec: Mapping[str, Any]) -> Any:
    """Import and return the object that ``_target_`` in ``spec`` names.

    Raises:
        ConfigError: ``_target_`` is missing or cannot be imported.
    """
    path = spec.get("_target_")
    if not isinstance(path, str) or not all(path.split(".")) or "." not in path:
        raise ConfigError.of(f"{key}._target_", path, "must be the dotted path of a class")
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError.of(f"{key}._target_", path, f"must be importable ({error})") from None


def _build_fields(key: str, found: type, values: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(found) if field.init}
    for name in values:
        if name not in fields:
            what = f"must be one of the fields of {found.__name__}: {', '.join(sorted(fields))}"
            raise ConfigError.of(f"{key}.{name}", values[name], what)
    # Missing fields are found here, because a TypeError of the constructor would not name the configuration's key.
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError.of(f"{key}.{name}", None, f"must be given: {found.__name__} has no default for it")
    hints = get_type_hints(found)
    return found(**{name: _value(f"{key}.{name}", hints[name], value) for name, value in values.items()})


def _value(key: str, hint: Any, value: Any) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return build_policy(key, value)
    if isinstance(value, Mapping) and isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build_fields(key, hint, value)
    return tuple(value) if isinstance(value, list) and get_origin(hint) is tuple else value


def _is_frozen(found: type) -> bool:
    return bool(found.__dataclass_params__.frozen)  # type: ignore[attr-defined]

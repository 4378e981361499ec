"""Converts ``JobConfig`` to plain dictionaries and back, to send it to ranks. Does not use Hydra."""

import dataclasses
import difflib
import types
import typing
from typing import Any, TypeVar

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config dataclass to nested dictionaries, lists and scalars (JSON types)."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> JobConfig:
    """Convert the result of ``to_dict`` back to a ``JobConfig``.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type.
    """
    return _build(JobConfig, values, "")


def close_matches(word: str, known: typing.Iterable[str]) -> str:
    """Return ``; did you mean 'a' or 'b'?`` or an empty text."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return "; did you mean " + " or ".join(repr(match) for match in found) + "?" if found else ""


def type_name(annotation: Any) -> str:
    """Name the type of a field in the terms of YAML, e.g. ``int or null`` or ``list of str``."""
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
    # YAML's ``true`` would pass as 1.
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)

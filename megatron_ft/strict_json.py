"""Converts typed values to strict JSON and back; ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` replace numbers that
JSON lacks."""

import json
import math
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

JsonValue = Any


def parse_json(content: bytes | str) -> JsonValue:
    """Parse JSON text.

    Raises:
        ValueError: not JSON, not UTF-8, or nested too deep.
    """
    try:
        return json.loads(content)
    except RecursionError:
        # Input of a peer or a file must not end the process by the depth of its brackets.
        raise ValueError("nested too deep") from None


def encode(value: object) -> JsonValue:
    """Convert ``value`` to strict JSON: tuples become lists, numbers that JSON lacks become strings."""
    if isinstance(value, float):
        # Standard JSON has no such numbers, and other readers refuse a file with Python's ``NaN``.
        return value if math.isfinite(value) else ("NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity")
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {name: encode(item) for name, item in value.items()}
    return value


def to_float(value: object) -> float:
    """Convert a JSON value to a number, including the three that are strings.

    Raises:
        ValueError: it is not a number, or an integer too large for a float.
    """
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(str(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} ({type(value).__name__}): must be a number")
    try:
        return float(value)
    except OverflowError:  # JSON integers have no limit
        raise ValueError("must be within the range of a float, is a larger integer") from None


def decode(hint: Any, value: JsonValue, where: str) -> Any:
    """Convert a JSON value to the type ``hint``.

    Raises:
        ValueError: it has another type. The message begins with ``where``.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else decode(inner, value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(decode(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: decode(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if hint is float:
        return to_number(value, where, always_float=True)
    if origin is None and type(value) is hint:
        return value
    raise ValueError(f"{where}={value!r}: must be {type_name(hint)}")


def type_name(hint: Any) -> str:
    """Name the type of a field in the terms of JSON, e.g. ``list of int``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments if argument is not types.NoneType)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"object of {type_name(arguments[1])}"
    return str(hint.__name__)


def to_number(value: JsonValue, where: str, always_float: bool = False) -> float:
    """Convert a JSON value to a number. Integers stay integers unless ``always_float``."""
    if type(value) is int and not always_float:
        return value
    try:
        return to_float(value)
    except ValueError as error:
        raise ValueError(f"{where}={error}") from None

"""Converts typed values to strict JSON and back, and checks the type and the ``Annotated`` bounds of each field.

``encode`` converts a dataclass to JSON values, and ``decode`` converts JSON values to a dataclass. ``decode`` raises a
``ValueError`` if a field is missing, unknown, of a wrong type or out of bounds; the message names the field. Numbers
that JSON lacks become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

JsonValue = Any
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Between:
    """Smallest and largest allowed value of a number. A float must also be finite."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Length:
    """Smallest and largest allowed number of characters of a string, or of entries of a list."""

    low: int
    high: int


def parse_json(content: bytes | str) -> JsonValue:
    """Parse JSON text.

    Raises:
        ValueError: the text is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        # Deeply nested brackets in the input of a peer or a file must not end the process.
        raise ValueError("the JSON text is nested too deeply") from None


def encode(value: Any) -> JsonValue:
    """Convert a dataclass, an enum or a collection to JSON values. Tuples become lists; keys become strings."""
    if isinstance(value, float):
        # Standard JSON has no NaN and no infinity, and other readers refuse a file with Python's ``NaN``.
        return value if math.isfinite(value) else ("NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity")
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): encode(item) for name, item in value.items()}
    return value


def decode(hint: Any, value: JsonValue, where: str = "") -> Any:
    """Convert a JSON value to the type ``hint``.

    Args:
        where: name of the value; error messages begin with it.

    Raises:
        ValueError: a field is missing or unknown, or has a wrong type, or its number or length is out of bounds.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = decode(arguments[0], value, where)
        for bound in arguments[1:]:
            _check_bound(bound, found, where)
        return found
    if hint is Any:
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        return _decode_fields(hint, value, where)
    if origin in (Union, types.UnionType):
        return _decode_optional(arguments, value, where, hint)
    if origin is Literal and any(type(value) is type(known) and value == known for known in arguments):
        return value
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        items = [decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: decode(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        known = {member.value: member for member in hint}
        if isinstance(value, str) and value in known:
            return known[value]
    # JSON does not distinguish 1 from 1.0.
    elif hint is float and (value in _NOT_FINITE or (isinstance(value, (int, float)) and not isinstance(value, bool))):
        return _to_float(value, where)
    elif origin is None and type(value) is hint:
        return value
    raise ValueError(f"{where}={value!r:.{_MAX_SHOWN}}: must be {type_name(hint)}")


def type_name(hint: Any) -> str:
    """Return the name of a type in terms of JSON, e.g. ``list of int``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is types.NoneType else type_name(part) for part in arguments)
    if origin in (tuple, list):
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"object of {type_name(arguments[1])}"
    if origin is Literal:
        return " or ".join(repr(known) for known in arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(repr(member.value) for member in hint)
    return str(getattr(hint, "__name__", hint))


def _to_float(value: float | str, where: str) -> float:
    try:
        # Integers in JSON have any size.
        return float(value)
    except OverflowError:
        raise ValueError(f"{where}: must be an integer within the range of a float") from None


def _decode_optional(arguments: tuple[Any, ...], value: JsonValue, where: str, hint: Any) -> Any:
    kinds = [kind for kind in arguments if kind is not types.NoneType]
    if value is None and len(kinds) < len(arguments):
        return None
    if value is None or len(kinds) != 1:
        raise ValueError(f"{where}={value!r:.{_MAX_SHOWN}}: must be {type_name(hint)}")
    return decode(kinds[0], value, where)


@cache
def _fields_of(kind: type) -> tuple[Mapping[str, Any], frozenset[str]]:
    hints = get_type_hints(kind, include_extras=True)
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    return {field.name: hints[field.name] for field in fields(kind)}, frozenset(required)


def _decode_fields(kind: type, value: JsonValue, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where or kind.__name__}={value!r:.{_MAX_SHOWN}}: must be an object")
    hints, required = _fields_of(kind)
    prefix = f"{where}." if where else ""
    # Unknown fields are checked first, so that the error for a misspelled field names the field as it is written.
    for name in value:
        if name not in hints:
            raise ValueError(f"{prefix}{name!s:.{_MAX_SHOWN}}: is not a field of {kind.__name__}")
    for name in sorted(required - value.keys()):
        raise ValueError(f"{prefix}{name}: is missing")
    return kind(**{name: decode(hints[name], item, f"{prefix}{name}") for name, item in value.items()})


def _check_bound(bound: Any, value: Any, where: str) -> None:
    match bound:
        case Between(low, high):
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if not (is_finite and low <= value <= high):
                raise ValueError(f"{where}={value!r:.{_MAX_SHOWN}}: must be from {low} to {high}")
        case Length(low, high):
            if not low <= len(value) <= high:
                raise ValueError(f"{where}: must have {low} to {high} entries or characters, but has {len(value)}")

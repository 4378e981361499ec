"""Converts typed values to strict JSON and back, checks each field, and parses other input from outside the program.

``encode`` converts a dataclass to JSON values, and ``decode`` converts JSON values to a dataclass. ``decode`` raises a
``ValueError`` if a field is missing, unknown, of a wrong type or not in its ``Annotated`` bounds; the message names the
field. Numbers that JSON lacks become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

import ast
import ipaddress
import json
import math
import os
import re
import socket
import stat
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_ft.errors import ConfigError, DataError, MegatronFtError

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


# Parsers raise errors that they do not document when bytes are damaged.
_PARSE_ERRORS = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


@contextmanager
def reading(
    path: Path | str, kind: type[MegatronFtError] = DataError, *, what: str = "cannot be read"
) -> Iterator[None]:
    """Turn any exception in the ``with`` block into an error of type ``kind`` that names ``path``. The project's own
    errors pass unchanged.

    Every exception is caught, because parsers raise undocumented errors on damaged bytes. Examples are MemoryError,
    RecursionError, zlib.error and NotImplementedError. A panic of a library in Rust is a ``BaseException``.
    """
    try:
        yield
    except MegatronFtError:
        raise
    except OSError as error:
        raise kind(f"{path}: {what}: {error.strerror or error}") from error
    except BaseException as error:
        # ``PanicException`` of PyO3 derives from ``BaseException``; Ctrl-C and exits must pass.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip()
        raise kind(f"{path}: {what}: {type(error).__name__}{f': {reason}' if reason else ''}") from error


def read_bytes(path: Path, *, max_bytes: int, kind: type[MegatronFtError] = DataError) -> bytes:
    """Read a regular file. Its size is checked before memory is allocated.

    Raises:
        MegatronFtError: the file cannot be read, is not a regular file, or is larger than ``max_bytes``. The type of
            the error is ``kind``.
    """
    with reading(path, kind):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe must not block
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise kind(f"{path}: must be a regular file")
            # One byte more than allowed is read, to detect that the file has grown since its size was checked.
            content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
            if status.st_size > max_bytes or len(content) > max_bytes:
                raise kind(f"{path}: {status.st_size} bytes: must be at most {max_bytes}")
            return content


def parse_call(key: str, text: str, names: Iterable[str], example: str) -> tuple[str, dict[str, object]]:
    """Parse a configuration value in the form of a call, e.g. ``kill(rank=1)``. All arguments must be keyword literals.

    Returns:
        The called name, and the arguments by keyword. An argument ``**mapping`` has the keyword ``"**"``.

    Raises:
        ConfigError: ``text`` is not a call of one of ``names`` in this form, or gives a keyword twice.
    """
    match = re.fullmatch(r"\s*([A-Za-z_]+)\s*(\(.*\))\s*", text, re.DOTALL)
    if match is None or match.group(1) not in names:
        raise ConfigError.of(key, text, f"must be a call of one of {', '.join(names)}, e.g. {example}")
    try:
        # The name may be a reserved word of Python, e.g. raise, so another name replaces it here.
        call = ast.parse("call" + match.group(2), mode="eval").body
    except _PARSE_ERRORS as error:
        raise ConfigError.of(key, text, f"must be one call with keyword arguments ({error})") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ConfigError.of(key, text, f"must be one call with keyword arguments only, e.g. {example}")
    values: dict[str, object] = {}
    for keyword in call.keywords:
        name = keyword.arg or "**"
        if name in values:
            raise ConfigError.of(key, text, f"must give {name} only once")
        try:
            values[name] = ast.literal_eval(keyword.value)
        except _PARSE_ERRORS:
            raise ConfigError.of(key, text, f"must give {name} as a literal") from None
    return match.group(1), values


def means_every_interface(host: str) -> bool:
    """Return whether a socket bound to ``host`` accepts connections on all network interfaces."""
    host = host.strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            # The C library reads "0", "0x0" and "0.0" as 0.0.0.0, and so does ``bind``.
            return socket.inet_aton(host) == bytes(4)
        except OSError:
            return host in ("", "*")
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_unspecified)

"""Parsers for input from outside the program: files, addresses, and configuration values in the form of a call."""

import ast
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.errors import ConfigError, DataError, MegatronFtError

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

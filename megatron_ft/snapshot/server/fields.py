"""Reads fields of messages and checks their bounds before they are used."""

from collections.abc import Mapping
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowKey

# Bounds above those of any job: they keep a damaged or hostile message from becoming a huge allocation or loop.
MAX_RANK = 1 << 20
MAX_SLICES = 1 << 16
# Ballots carry iterations as float64, which is exact up to here.
MAX_ITERATION = 1 << 53
MAX_BYTES = 1 << 46
MAX_TEXT = 4096


def integer(message: Mapping[str, Any], name: str, *, least: int = 0, most: int = MAX_ITERATION) -> int:
    """Read a whole number. Raises ControlError if it is missing, not a whole number, or out of bounds."""
    value = message.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ControlError(f"{name}={value!r}: must be a whole number from {least} to {most}")
    return value


def text(message: Mapping[str, Any], name: str, *, most: int = MAX_TEXT) -> str:
    """Read a string. Raises ControlError if it is missing, empty, too long, or has control characters."""
    value = message.get(name)
    # Texts go into log lines and paths, where control characters could forge others.
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise ControlError(f"{name}={value!r:.100}: must be text of 1 to {most} printable characters")
    return value


def mapping(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read an object. Raises ControlError if it is not one."""
    value = message.get(name)
    if not isinstance(value, dict):
        raise ControlError(f"{name}={value!r:.100}: must be an object")
    return value


def items(message: Mapping[str, Any], name: str) -> list[Any]:
    """Read a list. Raises ControlError if it is not one."""
    value = message.get(name)
    if not isinstance(value, list):
        raise ControlError(f"{name}={value!r:.100}: must be a list")
    return value


def host_and_port(address: object) -> tuple[str, int]:
    """Split ``host:port``, the host of IPv6 in brackets. Raises ControlError for anything else."""
    host, _, port = str(address).rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    if not host.strip("[]") or not is_port:
        raise ControlError(f"address {address!r:.100}: must be host:port")
    return host.strip("[]"), int(port)


def window_key(message: Mapping[str, Any]) -> WindowKey:
    """Read the key of the window that a message is about. Raises ControlError if it has none."""
    return WindowKey(start_iteration=integer(message, "start_iteration"), generation=integer(message, "generation"))


def stored_window(content: object) -> StoredWindow:
    """Read an entry of an inventory. Raises ControlError if it is not one."""
    try:
        window = StoredWindow.from_json(content)
    except ValueError as error:
        raise ControlError(f"window {error}") from None
    if not 0 <= window.num_held <= window.num_slices:
        raise ControlError(f"num_held={window.num_held}: must be from 0 to num_slices={window.num_slices}")
    return window

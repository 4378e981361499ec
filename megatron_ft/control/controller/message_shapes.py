"""The shape of every item that an agent may deliver, checked before any of it is used."""

import json
import math
from collections.abc import Callable, Mapping

from megatron_ft.errors import ControlError
from megatron_ft.framing import MAX_FRAME_BYTES

MAX_RECORD_BYTES = MAX_FRAME_BYTES - 64 * 1024
"""Of a record with what is said about it, as JSON: it goes on to the console in one message."""
MAX_ITEM_BYTES = 1024 * 1024
"""Of every other item: it goes into the journal, and what it says of an end goes on to the console."""
_MAX_INTEGER = 2**63 - 1
ITEMS = ("record", "reported", "raised", "broken", "exited", "progress", "hung")
_OF_ENDS = ("raised", "broken", "exited", "hung")


def check_shape(item: object) -> None:
    """Refuse what has not the fields of its kind, each of its type.

    Raises:
        ControlError: naming the item's kind and the field, or its size and the limit.
    """
    if not isinstance(item, dict):
        raise ControlError(f"malformed item {item!r:.100}: must be an object")
    kind = item.get("op")
    if not isinstance(kind, str) or kind not in ITEMS:
        raise ControlError(f"unknown item {kind!r:.100}")
    checks: dict[str, Callable[[object], bool]] = dict.fromkeys(("rank", "generation", "start"), _is_count)
    if kind == "record":
        checks["record"] = lambda value: isinstance(value, dict)
    if kind in _OF_ENDS:
        checks["at_seconds"] = _is_time
    if kind == "progress":
        checks |= {"iteration": _is_count, "step": _is_count, "phase": _is_text}
    if kind == "exited":
        checks |= {"returncode": _is_integer, "done": lambda value: type(value) is bool}
    _apply(kind, item, checks)
    _apply(kind, item, {name: check for name, check in _OPTIONAL.items() if name in item})
    most_bytes = MAX_RECORD_BYTES if kind == "record" else MAX_ITEM_BYTES
    num_bytes = len(json.dumps(item, separators=(",", ":")))
    if num_bytes > most_bytes:
        raise ControlError(f"item {kind} of rank {item['rank']} has {num_bytes} bytes: at most {most_bytes} are taken")


def _apply(kind: str, item: Mapping[str, object], checks: Mapping[str, Callable[[object], bool]]) -> None:
    for name, fits in checks.items():
        if name not in item:
            raise ControlError(f"malformed item {kind}: {name} is missing")
        if not fits(item[name]):
            raise ControlError(f"malformed item {kind}: {name}={item[name]!r:.100}")


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) <= _MAX_INTEGER


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INTEGER


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_OPTIONAL: dict[str, Callable[[object], bool]] = {
    "iteration": _is_count,
    "planned": lambda value: type(value) is bool,
    "exit_code": lambda value: value is None or _is_integer(value),
    "phase": _is_text,
    "error": _is_text,
    "traceback": _is_text,
    "log": _is_text,
    "log_tail": _is_text,
}

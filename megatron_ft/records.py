"""The base of all records of a run: typed, strict, flat JSON. The kinds are in ``events.py``.

A record is a frozen dataclass. ``to_record()`` makes a flat JSON object of it, ``from_record()`` reads
one back and refuses what does not fit. Numbers that JSON lacks travel as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``. Fields that are ``None`` are left out. No clock is read here: the process
that reports, or the sink that receives, stamps ``time_unix_seconds``.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_type_hints

from megatron_ft.strict_json import JsonValue, decode, encode, type_name

_KINDS: dict[str, type["Record"]] = {}

SCHEMA_VERSION = 2
"""Rises when a field changes its meaning or goes away; new records and new optional fields keep it."""


@dataclass(frozen=True, slots=True)
class Note:
    """One line about a record, for people who watch the run."""

    level: Literal["info", "good", "warning", "bad"]
    text: str
    """The line, without a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of ``events.jsonl`` or ``metrics.jsonl``."""

    kind: ClassVar[str] = ""
    durable: ClassVar[bool] = True
    """Whether the line is forced to disk at once; not so for records of every iteration."""

    time_unix_seconds: float | None = None
    """Time of the event, in seconds since 1970, by the wall clock of the process that stamped it."""

    def __init_subclass__(cls) -> None:
        # The class name is the kind on disk: a renamed class needs an entry in ``_today``.
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        _KINDS[cls.kind] = cls

    def describe(self) -> Note | None:
        """The line of this record; None where it is shown in other ways or not at all."""
        return Note("info", self.kind.replace("_", " "))

    def to_record(self) -> dict[str, JsonValue]:
        """A JSON object, ``kind`` first."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"kind": self.kind} | {name: encode(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_record(cls, record: Mapping[str, JsonValue]) -> "Record":
        """The inverse of ``to_record``.

        Called on ``Record`` it takes any kind, on a subclass only its own. Kinds of earlier versions are read as what
        replaced them.

        Raises:
            ValueError: unknown kind, unknown, missing or ill-typed field; the message names it.
        """
        record = _today(record)
        kind = record.get("kind")
        found = RECORDS.get(kind) if isinstance(kind, str) else None
        if found is None or not issubclass(found, cls):
            expected = ", ".join(name for name, known in RECORDS.items() if issubclass(known, cls))
            raise ValueError(f"record kind={kind!r}: must be one of {expected}")
        return found._of({name: value for name, value in record.items() if name != "kind"})

    @classmethod
    def _of(cls, values: Mapping[str, JsonValue]) -> "Record":
        hints = field_types(cls.kind)
        # Refused, not ignored: a misspelled field would be lost without a trace.
        if unknown := [name for name in values if name not in hints]:
            raise ValueError(f"{cls.kind}.{unknown[0]}: is no field of it; fields are {', '.join(hints)}")
        if missing := [name for name in _required(cls.kind) if name not in values]:
            raise ValueError(f"{cls.kind}.{missing[0]}: is required")
        return cls(**{name: decode(hints[name], value, f"{cls.kind}.{name}") for name, value in values.items()})


RECORDS: Mapping[str, type[Record]] = MappingProxyType(_KINDS)
"""Every kind of record that is defined."""


def schema() -> dict[str, JsonValue]:
    """All records as JSON: version, and per kind its meaning and each field's type and necessity."""
    kinds = {
        kind: {
            "meaning": (found.__doc__ or "").strip().splitlines()[0],
            "fields": {
                name: {"type": type_name(hint), "required": name in _required(kind)}
                for name, hint in field_types(kind).items()
            },
        }
        for kind, found in RECORDS.items()
    }
    return {"version": SCHEMA_VERSION, "records": kinds}


@cache
def field_types(kind: str) -> dict[str, Any]:
    """Field name to type of a kind of record."""
    record = RECORDS[kind]
    hints = get_type_hints(record)
    return {field.name: hints[field.name] for field in fields(record)}


@cache
def _required(kind: str) -> tuple[str, ...]:
    return tuple(field.name for field in fields(RECORDS[kind]) if field.default is MISSING)


def _today(record: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Rename what version 1 of the records called otherwise, so that run folders of that time are still read."""
    match record.get("kind"):
        case "log_healed":
            return {**record, "kind": "log_truncated"}
        case "recovery_decided":
            strategy = {"strategy": record["rung"]} if "rung" in record else {}
            rest = {name: value for name, value in record.items() if name != "rung"}
            return {**rest, **strategy, "kind": "recovery_started"}
        case "recovery_chosen":
            # It named no generation. Where ranks had been started again, a recovery_decided followed, which counts.
            source = record.get("source")
            found = (
                {"strategy": "window"} if source in ("memory", "persisted") else {"strategy": source, "source": None}
            )
            merged = {**record, **found, "kind": "recovery_started", "generation": 0}
            return {name: value for name, value in merged.items() if value is not None}
    return record

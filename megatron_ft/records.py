"""``Record``, the base class of all records of a run, with strict conversion to and from flat JSON objects.

``events.py`` defines the kinds of records. ``to_record()`` makes a flat JSON object. ``from_record()`` reads one and
refuses invalid content. ``Record.read()`` also accepts kinds that this version does not define. Numbers that JSON lacks
are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Fields with the value ``None`` are left out.
This module reads no clock: the process that reports or receives a record sets ``time_unix_seconds``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_type_hints

from megatron_ft.serde import JsonValue, decode, encode, type_name

_KINDS: dict[str, type["Record"]] = {}
_KIND = re.compile(r"[a-z][a-z0-9_]{0,99}")

FORMER_STRATEGIES = {
    "replicas": "living_state",
    "localized": "localized_replay",
    "window": "rollback",
    "nothing": "start_over",
}
"""Maps former names of recovery strategies, as in records of earlier versions, to their present names."""

SCHEMA_VERSION = 2
"""Version of the records' format. It rises when a field is removed or gets another meaning, not for a new field."""


@dataclass(frozen=True, slots=True)
class Note:
    """Text and severity with which the terminal and reports show a record."""

    level: Literal["info", "good", "warning", "bad"]
    text: str
    """One line of text, without the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record of a run, which is one line of ``events.jsonl`` or ``metrics.jsonl``."""

    kind: ClassVar[str] = ""
    durable: ClassVar[bool] = True
    """Whether a record of this kind is synced to disk at once. False for records that every iteration writes."""

    time_unix_seconds: float | None = None
    """Time of the event in seconds since 1970, by the clock of the process that sets this field."""

    def __init_subclass__(cls) -> None:
        # This class is ``OtherRecord``, in which each record has a kind of its own.
        if isinstance(cls.__dict__.get("kind"), property):
            return
        # Files contain the kind, which follows from the class name. So a renamed class needs an entry in ``_today``.
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        _KINDS[cls.kind] = cls

    def describe(self) -> Note | None:
        """Return the text with which the terminal and reports show this record; None if they do not show it."""
        return Note("info", self.kind.replace("_", " "))

    def to_record(self) -> dict[str, JsonValue]:
        """Convert the record to a JSON object whose first key is ``kind``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"kind": self.kind} | {name: encode(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_record(cls, record: Mapping[str, JsonValue]) -> "Record":
        """Create a record from a JSON object that ``to_record`` made.

        ``Record.from_record`` accepts every kind; a subclass accepts only its own kind. A kind that was renamed since
        an earlier version is read as its present kind.

        Raises:
            ValueError: the kind is unknown, or a field is unknown, missing or of the wrong type; the message names it.
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
        # An unknown field is an error, because the value of a misspelled field would be lost otherwise.
        if unknown := [name for name in values if name not in hints]:
            raise ValueError(
                f"{cls.kind}.{unknown[0]}: is not a field of this record, whose fields are {', '.join(hints)}"
            )
        if missing := [name for name in _required(cls.kind) if name not in values]:
            raise ValueError(f"{cls.kind}.{missing[0]}: is required")
        return cls(**{name: decode(hints[name], value, f"{cls.kind}.{name}") for name, value in values.items()})

    @classmethod
    def read(cls, line: Mapping[str, JsonValue]) -> "Record":
        """Create a record from a line of a run's files. A record of a kind that this version does not define becomes
        an ``OtherRecord``.

        Raises:
            ValueError: the kind is missing, a field has the wrong type, or a field of a defined kind is unknown or
                missing.
        """
        kind = _today(line).get("kind")
        if not isinstance(kind, str) or not _KIND.fullmatch(kind) or kind in RECORDS:
            return Record.from_record(line)
        time = decode(float | None, line.get("time_unix_seconds"), f"{kind}.time_unix_seconds")
        values = {name: value for name, value in line.items() if name not in ("kind", "time_unix_seconds")}
        return OtherRecord(name=kind, values=values, time_unix_seconds=time)


RECORDS: Mapping[str, type[Record]] = MappingProxyType(_KINDS)
"""Class of each kind of record that this version defines, by the name of the kind."""

_MAX_SHOWN = 200
"""Largest number of characters of an ``OtherRecord``'s fields that are shown; the rest is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRecord(Record):
    """A record of a kind that this version does not define, because another package or a newer version defines it."""

    name: str
    """Kind of the record."""
    values: Mapping[str, JsonValue]
    """All fields of the record except its kind and its time."""

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.name

    def describe(self) -> Note:
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in self.values.items())
        if len(shown) > _MAX_SHOWN:
            shown = f"{shown[:_MAX_SHOWN]}..."
        return Note("info", self.name.replace("_", " ") + (f": {shown}" if shown else ""))

    def to_record(self) -> dict[str, JsonValue]:
        time = {} if self.time_unix_seconds is None else {"time_unix_seconds": self.time_unix_seconds}
        return {"kind": self.name, **time, **self.values}


def _shown(value: JsonValue) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        return "..."


def schema() -> dict[str, JsonValue]:
    """Return the schema of all records as JSON: meaning of each kind, type of each field and whether it is required."""
    kinds = {
        kind: {
            "meaning": (found.__doc__ or "").strip().splitlines()[0],
            "fields": {
                name: {"type": type_name(hint).removesuffix(" or null"), "required": name in _required(kind)}
                for name, hint in field_types(kind).items()
            },
        }
        for kind, found in RECORDS.items()
    }
    return {"version": SCHEMA_VERSION, "records": kinds}


@cache
def field_types(kind: str) -> dict[str, Any]:
    """Return the fields of the records of this kind: the type of each field, by the name of the field."""
    record = RECORDS[kind]
    hints = get_type_hints(record)
    return {field.name: hints[field.name] for field in fields(record)}


@cache
def _required(kind: str) -> tuple[str, ...]:
    return tuple(field.name for field in fields(RECORDS[kind]) if field.default is MISSING)


def _today(record: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    # Convert former names of kinds and fields to the present names, so that earlier run folders can still be read.
    match record.get("kind"):
        case "recovery_started":
            return {**record, "strategy": _name_of_strategy(record["strategy"])} if "strategy" in record else record
        case "log_healed":
            return {**record, "kind": "log_truncated"}
        case "recovery_decided":
            strategy = {"strategy": _name_of_strategy(record["rung"])} if "rung" in record else {}
            rest = {name: value for name, value in record.items() if name != "rung"}
            return {**rest, **strategy, "kind": "recovery_started"}
        case "recovery_chosen":
            # This kind has no generation, so set 0. After a restart, a ``recovery_decided`` with one followed it.
            source = record.get("source")
            found = (
                {"strategy": "rollback"}
                if source in ("memory", "persisted")
                else {"strategy": _name_of_strategy(source), "source": None}
            )
            merged = {**record, **found, "kind": "recovery_started", "generation": 0}
            return {name: value for name, value in merged.items() if value is not None}
    return record


def _name_of_strategy(name: JsonValue) -> JsonValue:
    return FORMER_STRATEGIES.get(name, name) if isinstance(name, str) else name
